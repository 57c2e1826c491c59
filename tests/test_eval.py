"""eval.py: losses, perplexity and bits per byte against direct computations, sampling, checkpoints; and analyze.py."""

import io
import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import analyze
import train
from bpe import SOURCES, save_bpe
from eval import in_sight, main, paired, text_losses, val_windows, window_losses
from helpers import random_model, tiny_config, tokens
from model import GPT, PATHWAYS, ConfigError, load_checkpoint
from test_ddp import torchrun
from errors import DataError
from prepare_data import TokenBin, prepare
from processes import choose_device
from tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
T = 16                                                                     # seq_len of tiny_config
BYTE = load_tokenizer("byte")
TEXT = "naïve 日本語 €5 😀 e\u0301, " * 3


def byte_model(seed=0, **kw):
    """Random weights in float64."""
    return random_model(seed, **{"vocab_size": 257, "residual": "mhar"} | kw).eval()


def bpe_model(tokenizer, seed=0):
    return byte_model(seed, vocab_size=tokenizer.n_vocab)


def save(path, model, /, tokenizer=BYTE, data_dir="nowhere", **changes):
    """A checkpoint as train.py writes it, less the optimizer's state."""
    file = None if tokenizer.file is None else torch.frombuffer(bytearray(tokenizer.file), dtype=torch.uint8)
    state = {"model": model.state_dict(), "step": 7, "best_val_loss": 1.5, "data": {"train": "", "val": ""},
             "config": asdict(model.config) | {"data_dir": str(data_dir), "max_steps": 7},
             "tokenizer": tokenizer.meta() | {"file": file}}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state | changes, path)
    return path


def chain(ids, vocab_size=257, **kw):
    """A model in which each of `ids` (all unlike) is surely followed by the next: one-hot embedding, body of zeros."""
    model = GPT(tiny_config(vocab_size=vocab_size, d_model=vocab_size, n_head=1, n_kv_head=1, head_dim=2, n_layer=1,
                            tie_embeddings=False, **kw))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith("norm.weight"):
                p.zero_()
        model.embed.weight.fill_diagonal_(1)
        for a, b in pairwise(ids):
            model.lm_head.weight[b, a] = 10
    return model


def chain_of(text):
    return chain([*text.encode(), BYTE.eot])


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(model, ...) saves it and returns the path as text."""
    return lambda *args, **kw: str(save(tmp_path / "ckpt.pt", *args, **kw))


@pytest.fixture
def evaluated(tmp_path):
    """evaluated(command, ...) runs eval.py and returns the rows of its JSON."""
    def go(*arguments):
        main([*map(str, arguments), "--json", str(tmp_path / "out.json")])
        return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    return go


@pytest.fixture
def corpus(tmp_path):
    """corpus(tokenizer) -> a data folder of some of this repository's lines and of unlike scripts."""
    def go(tokenizer=BYTE, name="data"):
        lines = SOURCES.splitlines()[:120] + [f"{i} {TEXT}" for i in range(20)]
        (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
        prepare([tmp_path / "lines.jsonl"], tokenizer, tmp_path / name, val_permille=300)
        return tmp_path / name
    return go


@torch.no_grad()
def surprise(model, ids):
    """-log p of the last of `ids` after the others."""
    return -model(torch.tensor([ids[:-1]]))[0][0, -1].double().log_softmax(-1)[ids[-1]].item()


# ----------------------------------------------------------------------------------------------------------------------
# loss on a val split


@pytest.mark.parametrize("style", ["byte", "gpt2"])
def test_loss_is_the_direct_mean_for_any_batch_size(style, corpus, checkpoint, evaluated, tmp_path):
    tokenizer = BYTE if style == "byte" else load_tokenizer(str(save_bpe(tmp_path / "toy.json")))
    folder = corpus(tokenizer)
    model = bpe_model(tokenizer)
    path = checkpoint(model, tokenizer, folder)
    data = TokenBin(folder, "val")
    n = data.n_windows(T)
    windows = np.arange(7) * n // 7                                        # no multiple of 3 or 8
    scored = data.windows(windows, T)
    total = sum(surprise(model, w[:i].tolist()) for w in scored for i in range(2, T + 2))
    n_bytes = sum(len(tokenizer.token_bytes(i)) for i in scored[:, 1:].flatten())
    assert tokenizer.eot in scored[:, 1:] and n_bytes > 0
    for batch_size in (1, 3, 8):
        row, = evaluated("loss", path, "--tokens", 7 * T + 5, "--batch_size", batch_size)
        assert row["loss"] == pytest.approx(total / (7 * T), rel=1e-10)
        assert row["perplexity"] == pytest.approx(math.exp(total / (7 * T)), rel=1e-8)
        assert row["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-10)
        assert {k: v for k, v in row.items() if k not in ("loss", "perplexity", "bits_per_byte", "by_position")} == {
            "checkpoint": path, "step": 7, "weights": "model", "data": str(folder / "val.bin"), "tokens": 7 * T,
            "bytes": n_bytes, "context": T, "stride": T}
    row, = evaluated("loss", path)                                         # all windows
    assert row["tokens"] == n * T


def test_table_says_what_the_numbers_rest_on(corpus, tmp_path, evaluated, capsys):
    folder = corpus()
    paths = [save(tmp_path / f"{t}.pt", byte_model(seq_len=t), data_dir=folder) for t in (8, 16)]
    capsys.readouterr()                                                    # what the preparation said
    rows = evaluated("loss", *paths)
    assert [r["context"] for r in rows] == [8, 16] and rows[0]["loss"] != rows[1]["loss"]
    header, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert len(lines) == 2
    for line, row in zip(lines, rows):
        cells = {key: line[header.index(key):].split()[0] for key in header.split()}
        assert cells == {k: f"{v:.4f}" if isinstance(v, float) else str(v) for k, v in row.items() if k not in ("by_position", "against_first")}
    assert rows[1]["against_first"] is None                                # its windows are others


def test_checkpoints_are_compared_window_by_window(corpus, tmp_path, evaluated, capsys):
    folder = corpus()
    models = [byte_model(seed) for seed in (0, 1, 0)]
    paths = [save(tmp_path / f"{i}.pt", model, data_dir=folder) for i, model in enumerate(models)]
    rows = evaluated("loss", *paths, "--tokens", 9 * T)
    data = TokenBin(folder, "val")
    windows = val_windows(data, T, 9 * T)
    losses = [[np.mean([surprise(model, w[:i].tolist()) for i in range(2, T + 2)]) for w in data.windows(windows, T)] for model in models[:2]]
    d = np.subtract(losses[1], losses[0])
    error = math.sqrt(sum((d - d.mean()) ** 2) / 8 / 9)
    found = rows[1]["against_first"]
    assert found == pytest.approx({"difference": d.mean(), "standard_error": error, "low": d.mean() - 1.96 * error,
                                   "high": d.mean() + 1.96 * error, "n": 9}, rel=1e-9)
    assert rows[1]["loss"] - rows[0]["loss"] == pytest.approx(found["difference"]) and "against_first" not in rows[0]
    assert rows[2]["against_first"] == paired([0] * 9, [0] * 9) and f"{found['low']:.4f}" in capsys.readouterr().out


def test_losses_by_what_is_in_sight(corpus, checkpoint, evaluated):
    """Against a loop over tokens; documents end inside of windows."""
    folder, model = corpus(), byte_model()
    row, = evaluated("loss", checkpoint(model, data_dir=folder), "--tokens", 12 * T, "--batch_size", 5)
    expected = {}
    data = TokenBin(folder, "val")
    for window in data.windows(val_windows(data, T, 12 * T), T).tolist():
        for i in range(1, T + 1):
            before = window[:i]
            seen = before[::-1].index(BYTE.eot) if BYTE.eot in before else i
            name = "0" if seen == 0 else next(f"{2 ** k}-{2 ** (k + 1) - 1}" if k else "1" for k in range(9) if seen < 2 ** (k + 1))
            expected.setdefault(name, []).append(surprise(model, window[:i + 1]))
    assert len(expected) > 4 and row["by_position"].keys() == expected.keys()
    for name, losses in expected.items():
        assert row["by_position"][name] == pytest.approx({"loss": sum(losses) / len(losses), "tokens": len(losses)}, rel=1e-9)
    x = torch.tensor([[5, 256, 7, 7, 256, 256, 1]])
    assert in_sight(x, 256).tolist() == [[1, 0, 1, 2, 0, 0, 1]]


def test_many_processes_print_the_numbers_of_one(corpus, tmp_path, evaluated):
    folder = corpus()
    paths = [save(tmp_path / f"{i}.pt", byte_model(i).float(), data_dir=folder) for i in range(2)]
    one = evaluated("loss", *paths, "--batch_size", 3)
    for n in (2, 3):
        code, output = torchrun("eval.py", "loss", *paths, "--batch_size=3", f"--json={tmp_path / 'n.json'}", n=n)
        assert code == 0 and output.count("loss by tokens") == 1, output
        assert json.loads((tmp_path / "n.json").read_text()) == one       # to the last bit


def test_data_dir_names_other_data_of_the_same_tokenizer_only(corpus, checkpoint, evaluated, tmp_path):
    path = checkpoint(byte_model())
    with pytest.raises(DataError, match="no data in nowhere"):
        main(["loss", path])
    folder = corpus()
    assert evaluated("loss", path, "--data_dir", folder)[0]["data"] == str(folder / "val.bin")
    other = corpus(load_tokenizer(str(save_bpe(tmp_path / "toy.json"))), "other")
    with pytest.raises(DataError, match="other/val.bin was made with tokenizer 'tokenizer.json', .* with another, 'byte'"):
        main(["loss", path, "--data_dir", str(other)])


def test_val_windows_are_fixed_and_evenly_spread(corpus):
    data = TokenBin(corpus(), "val")
    n = data.n_windows(T)
    assert val_windows(data, T, None).tolist() == list(range(n)) == val_windows(data, T, n * T).tolist()
    some = val_windows(data, T, 10 * T + T - 1)
    assert len(some) == 10 and set(np.diff(some)) <= {n // 10, n // 10 + 1} and some[0] == 0
    assert n - some[-1] <= n // 10 + 1
    message = rf"eval_tokens=-?\d+, but .*val.bin has {n} windows of seq_len=16: choose 16 to {n * T}, or None"
    for bad in (0, T - 1, (n + 1) * T, -T):
        with pytest.raises(ConfigError, match=message):
            val_windows(data, T, bad)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_windows(world, corpus):
    data, model = TokenBin(corpus(), "val"), byte_model().train()
    windows = np.arange(10)
    whole = window_losses(model, data, windows, 4, "cpu")
    parts = [window_losses(model, data, windows, 4, "cpu", rank, world) for rank in range(world)]
    assert torch.equal(sum(parts), whole) and all((part != whole).any() for part in parts) and model.training


# ----------------------------------------------------------------------------------------------------------------------
# text files


@pytest.mark.parametrize("stride", [T, T // 2, 5, 1])
@pytest.mark.parametrize("n", [1, T - 1, T, T + 1, 2 * T, 2 * T + 3])
def test_text_losses_against_one_token_at_a_time(n, stride):
    """The first window that reaches an id scores it. Windows start every `stride` ids; end of text comes first."""
    model, ids = byte_model(), tokens(n, vocab=256).numpy()
    text = [BYTE.eot, *ids.tolist()]
    expected = []
    for i in range(n):
        start = max(0, math.ceil((i + 1 - T) / stride)) * stride
        assert i < start + T
        expected.append(surprise(model, text[start:i + 2]))
    for batch_size in (1, 3, 8):
        found, seen = text_losses(model, ids, BYTE.eot, stride, batch_size, "cpu")
        assert found.tolist() == pytest.approx(expected, rel=1e-10)
        assert seen.tolist() == [i - max(0, math.ceil((i + 1 - T) / stride)) * stride + (i + 1 > T) for i in range(n)]


@pytest.mark.parametrize("style", ["byte", "gpt2", "llama3"])
def test_bits_per_byte_are_those_of_the_text(style, tmp_path, checkpoint, evaluated):
    tokenizer = BYTE if style == "byte" else load_tokenizer(str(save_bpe(tmp_path / "toy.json", style)))
    model = bpe_model(tokenizer)
    ids = tokenizer.encode(TEXT)
    assert any("\ufffd" in tokenizer.decode([i]) for i in ids)             # ids that are parts of characters
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    (tmp_path / "b.txt").write_text("x")
    losses, _ = text_losses(model, ids, tokenizer.eot, 4, 1, "cpu")
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    long, short = evaluated("text", checkpoint(model, tokenizer), *files, "--stride", 4)
    assert (long["bytes"], long["tokens"]) == (len(TEXT.encode()), len(ids))
    assert (long["context"], long["stride"]) == (T, 4)
    bits = -sum(math.log2(math.exp(-loss)) for loss in losses.tolist())
    assert long["bits_per_byte"] == pytest.approx(bits / len(TEXT.encode()), rel=1e-9)
    assert (short["text"], short["bytes"], short["tokens"]) == (str(files[1]), 1, 1)
    assert short["loss"] == pytest.approx(surprise(model, [tokenizer.eot, *tokenizer.encode("x")]), rel=1e-10)


def test_perplexity_of_a_uniform_model_is_the_vocabulary(corpus, tmp_path, checkpoint, evaluated):
    model = chain([])
    (tmp_path / "a.txt").write_text("any text of some length")
    path = checkpoint(model, data_dir=corpus())
    for row in (*evaluated("text", path, tmp_path / "a.txt"), *evaluated("loss", path)):
        assert row["perplexity"] == pytest.approx(257, rel=1e-5)
        assert row["loss"] == pytest.approx(math.log(257), rel=1e-6)
    assert evaluated("text", path, tmp_path / "a.txt")[0]["bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-6)


@pytest.mark.parametrize("content, message", [(b"", "a.txt is empty"), (b"\xef\xbb\xbf", "a.txt is empty"),
                                              ("Grüße".encode("latin-1"), r"a.txt: not UTF-8 \(byte 2\)")])
def test_text_that_cannot_be_scored(content, message, tmp_path, checkpoint):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        main(["text", checkpoint(byte_model()), str(tmp_path / "a.txt")])


@pytest.mark.parametrize("command, option, value, message", [
    ("text", "stride", 0, "--stride must be in 1 .. 16 .* not 0"), ("text", "stride", 17, "1 .. 16 .* not 17"),
    ("text", "stride", -1, "not -1"), ("text", "batch_size", 0, "--batch_size must be at least 1, not 0"),
    ("loss", "batch_size", -1, "--batch_size must be at least 1, not -1"), ("loss", "tokens", 0, "choose 16 to"),
    ("loss", "weights", "ema", "the checkpoint has no 'ema' weights; it has model, step"),
    ("sample", "temperature", -1, "temperature must be a number, at least 0, not -1"),
    ("sample", "temperature", math.nan, "temperature must be a number, at least 0, not nan"),
    ("sample", "top_k", -1, "top_k must not be negative"),
    ("sample", "top_p", 0, "top_p must be in"), ("sample", "top_p", 1.5, "top_p must be in"),
    ("sample", "max_new_tokens", 0, "--max_new_tokens must be at least 1, not 0"),
    ("sample", "num_samples", -1, "--num_samples must be at least 1, not -1"),
    ("loss", "device", "gpu", "unknown device='gpu'; known: auto, cpu, cuda, mps")])
def test_options_that_cannot_work_are_named(command, option, value, message, corpus, checkpoint, tmp_path):
    path = checkpoint(byte_model(), data_dir=corpus())
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=message) as e:
        main([command, path, *[str(tmp_path / "a.txt")] * (command == "text"), f"--{option}={value}"])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_devices_that_are_not_there(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device={device}, but torch .*: use --device=cpu"):
        choose_device(device)
    assert choose_device("auto") == "cpu"


@pytest.mark.parametrize("command", ["loss", "text", "sample"])
def test_broken_weights_give_a_message_and_no_number(command, corpus, checkpoint, tmp_path):
    model = byte_model(tie_embeddings=False)
    path = checkpoint(model, data_dir=corpus())
    with torch.no_grad():
        model.lm_head.weight[3, 5] = math.nan
    checkpoint(model, data_dir=tmp_path / "data")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="the checkpoint is broken"):
        main([command, path, *[str(tmp_path / "a.txt")] * (command == "text"), "--json", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


def test_ids_beyond_the_vocabulary_of_the_model_are_named(corpus, checkpoint, tmp_path):
    path = checkpoint(byte_model(vocab_size=256), data_dir=corpus())       # end of text is 256
    (tmp_path / "a.txt").write_text("plain")
    for arguments in (["loss", path], ["text", path, str(tmp_path / "a.txt")], ["sample", path, "--prompt", ""]):
        with pytest.raises(DataError, match="holds token id 256, but the model's vocab_size is 256"):
            main(arguments)
    main(["sample", path, "--prompt", "plain", "--max_new_tokens", "2"])


# ----------------------------------------------------------------------------------------------------------------------
# sampling


class Pieces(io.StringIO):
    """Standard output that remembers what was written at once."""
    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, piece):
        self.pieces.append(piece)
        return super().write(piece)


def test_characters_are_printed_whole_and_end_of_text_stops(checkpoint, evaluated, monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := Pieces())
    row, = evaluated("sample", checkpoint(chain_of("aé€😀!")), "--prompt", "a", "--temperature", 0)
    assert out.getvalue() == "aé€😀!\n" and [p for p in out.pieces if p] == ["a", "é", "€", "😀", "!", "\n"]
    assert row == {"prompt": "a", "text": "é€😀!", "prompt_tokens": 1, "tokens": 11, "seed": 0, "ended": True}


def test_a_character_left_unfinished_is_marked(checkpoint, evaluated, capsys):
    path = checkpoint(chain_of("aé€!"))
    row, = evaluated("sample", path, "--prompt", "a", "--temperature", 0, "--max_new_tokens", 4)
    assert row["text"] == "é\ufffd" and row["tokens"] == 4 and not row["ended"]
    assert capsys.readouterr().out == "aé\ufffd\n"


def test_empty_prompt_starts_a_document(checkpoint, evaluated, capsys):
    path = checkpoint(chain([BYTE.eot, *b"xyz", 10]))
    assert evaluated("sample", path, "--temperature", 0, "--max_new_tokens", 4)[0]["text"] == "xyz\n"
    out, err = capsys.readouterr()
    assert out == "xyz\n\n" and "4 tokens" in err


def test_prompt_is_text_whatever_it_says(checkpoint, evaluated):
    row, = evaluated("sample", checkpoint(chain_of(">!")), "--prompt", "<|endoftext|>", "--temperature", 0)
    assert row["text"] == "!" and row["ended"]


def test_prompt_from_an_ascii_terminal(checkpoint, evaluated):
    row, = evaluated("sample", checkpoint(chain_of("é!")), "--prompt", "\udcc3\udca9", "--temperature", 0)
    assert (row["prompt"], row["text"]) == ("é", "!")


def test_prompt_longer_than_the_context(checkpoint, evaluated, capsys):
    ring = [*b"abcdefghijklmnopqrstuvwxyz"]
    path = checkpoint(chain([*ring, ring[0]]))
    prompt = "abcdefghijklmnopqrst"
    for length in (T - 1, T, T + 1, T + 4):
        row, = evaluated("sample", path, "--prompt", prompt[:length], "--temperature", 0, "--max_new_tokens", 40)
        assert row["text"] == ("abcdefghijklmnopqrstuvwxyz" * 3)[length:length + 40]
        notice = f"a prompt has {length} tokens, the context {T}: the newest are read" in capsys.readouterr().err
        assert notice == (length > T)


def test_seeds(checkpoint, evaluated):
    path = checkpoint(byte_model())
    options = ["--max_new_tokens", 30, "--temperature", 1, "--num_samples", 3]
    a, b = (evaluated("sample", path, *options, "--seed", 5) for _ in range(2))
    assert a == b and [r["seed"] for r in a] == [5, 6, 7] and len({r["text"] for r in a}) == 3
    assert evaluated("sample", path, *options[:4], "--seed", 6) == [a[1]]


def test_prompts_of_a_file(checkpoint, evaluated, tmp_path, capsys):
    """Each as if alone, whatever is in its batch; text and JSON lines."""
    path = checkpoint(byte_model())
    prompts = ["def main(", "é", "x" * 40, "a\u2028b"]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(p if i % 2 else {"prompt": p}) for i, p in enumerate(prompts)) + "\n\n")
    options = ["--max_new_tokens", 25, "--num_samples", 2, "--seed", 3]
    rows = evaluated("sample", path, "--prompts", tmp_path / "p.jsonl", *options, "--batch_size", 3)
    out = capsys.readouterr()
    assert [(r["prompt"], r["seed"]) for r in rows] == [(p, seed) for p in prompts for seed in (3, 4)]
    assert all(r["prompt"] + r["text"] in out.out for r in rows) and "tokens/s]" in out.err
    assert "up to 65 tokens for a context of 16: whenever it is full, its newest half goes on" in out.err
    for i, prompt in enumerate(prompts):
        assert evaluated("sample", path, "--prompt", prompt, *options, "--batch_size", 1) == rows[2 * i:2 * i + 2]
    (tmp_path / "p.txt").write_text("one\n\ntwo \n", encoding="utf-8")
    assert [r["prompt"] for r in evaluated("sample", path, "--prompts", tmp_path / "p.txt")] == ["one", "two "]


def test_a_batch_of_samples_ends_when_all_have(checkpoint, evaluated, tmp_path):
    (tmp_path / "p.txt").write_text("a\nabcdef\nabc\n")
    rows = evaluated("sample", checkpoint(chain_of("abcdefgh")), "--prompts", tmp_path / "p.txt", "--temperature", 0)
    assert [(r["text"], r["tokens"], r["ended"]) for r in rows] == [("bcdefgh", 8, True), ("gh", 3, True), ("defgh", 6, True)]


def test_typed_prompts(checkpoint, monkeypatch, capsys):
    typed = iter(["a", "abcd", ""])
    monkeypatch.setattr("builtins.input", lambda shown: next(typed))
    main(["sample", checkpoint(chain_of("abcdef")), "--interactive", "--temperature", "0"])
    out = capsys.readouterr().out
    assert "\nabcdef\nabcdef\n" in out and next(typed, None) is None
    monkeypatch.setattr("builtins.input", lambda shown: (_ for _ in ()).throw(EOFError))
    main(["sample", checkpoint(chain_of("abcdef")), "--interactive"])


@pytest.mark.parametrize("name, content, message", [
    ("p.txt", "\n \n", "p.txt holds no prompts"), ("p.jsonl", '"a"\n{', "p.jsonl:2: not JSON"),
    ("p.jsonl", '{"text": "a"}', 'p.jsonl:1: neither a string nor {"prompt": a string}'), ("p.jsonl", "3", "p.jsonl:1: neither")])
def test_prompts_that_are_none(name, content, message, checkpoint, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        main(["sample", checkpoint(byte_model()), "--prompts", str(tmp_path / name)])
    with pytest.raises(ConfigError, match="give one of --prompt, --prompts and --interactive"):
        main(["sample", checkpoint(byte_model()), "--prompts", "x", "--prompt", "y"])


def test_both_kinds_of_windows_are_named(checkpoint, evaluated, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text that is longer than one window of sixteen tokens")
    rows = evaluated("text", checkpoint(byte_model()), tmp_path / "a.txt")
    assert [(r["windows"], r["stride"]) for r in rows] == [("disjoint", T), ("sliding", T // 2)]
    for stride, row in ((T, rows[0]), (T // 2, rows[1])):
        alone, = evaluated("text", checkpoint(byte_model()), tmp_path / "a.txt", "--stride", stride, "--batch_size", 2)
        assert alone == row or alone["loss"] == pytest.approx(row["loss"], rel=1e-12)
        assert sum(b["tokens"] for b in row["by_position"].values()) == row["tokens"]
        assert sum(b["tokens"] * b["loss"] for b in row["by_position"].values()) == pytest.approx(row["tokens"] * row["loss"])
    assert "0" in rows[1]["by_position"] and rows[1]["by_position"]["8-15"]["tokens"] > rows[0]["by_position"]["8-15"]["tokens"]


@pytest.mark.parametrize("options, varied", [
    (["--temperature", 0], False), (["--temperature", 1e-9], False), (["--top_k", 1], False),
    (["--top_p", 1e-9], False),
    (["--top_k", 10**9], True), (["--top_k", 0], True), (["--top_p", 1], True)])
def test_greedy_and_not(options, varied, checkpoint, evaluated):
    path = checkpoint(byte_model())
    rows = [evaluated("sample", path, "--max_new_tokens", 20, "--seed", seed, *options)[0] for seed in range(3)]
    assert len({row["text"] for row in rows}) == (3 if varied else 1)


@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_that_pad_the_vocabulary_are_never_drawn(temperature, checkpoint, evaluated):
    model = chain([], vocab_size=384)
    with torch.no_grad():
        model.lm_head.weight[257:] = 100
        model.lm_head.weight[65] = 50
    row, = evaluated("sample", checkpoint(model), "--temperature", temperature, "--max_new_tokens", 20)
    assert row["text"] == "A" * 20


def test_an_id_that_is_not_in_use_is_marked(tmp_path, checkpoint, evaluated):
    def edit(spec):
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": 610, "content": "<|far|>"})

    tokenizer = load_tokenizer(str(save_bpe(tmp_path / "toy.json", edit=edit)))
    a, b, c = (int(tokenizer.encode(letter)[0]) for letter in "abc")
    path = checkpoint(chain([a, 605, b, 610, c, tokenizer.eot], vocab_size=640), tokenizer)
    assert evaluated("sample", path, "--prompt", "a", "--temperature", 0)[0]["text"] == "\ufffdbc"


def test_the_checkpoint_carries_its_tokenizer(tmp_path, checkpoint, evaluated):
    file = save_bpe(tmp_path / "toy.json", "qwen")
    tokenizer = load_tokenizer(str(file))
    path = checkpoint(bpe_model(tokenizer), tokenizer)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    commands = ["text", path, tmp_path / "a.txt"], ["sample", path, "--prompt", TEXT, "--max_new_tokens", 20]
    before = [evaluated(*c) for c in commands]
    file.unlink()
    assert [evaluated(*c) for c in commands] == before

    other = load_tokenizer(str(save_bpe(tmp_path / "toy.json", "gpt2")))
    other.sha256 = tokenizer.sha256
    with pytest.raises(DataError, match="'tokenizer.json' found here is not the one"):
        main(["sample", checkpoint(bpe_model(tokenizer), other)])


# ----------------------------------------------------------------------------------------------------------------------
# checkpoints


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("residual", PATHWAYS)
def test_round_trip(residual, tied, checkpoint):
    model, idx = byte_model(residual=residual, tie_embeddings=tied), tokens(2, T)
    again = GPT.from_checkpoint(checkpoint(model))
    assert again.config == model.config and not again.training
    assert torch.equal(again(idx)[0], model(idx)[0])
    assert (again.lm_head.weight is again.embed.weight) == tied


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrapped_models(prefix, checkpoint):
    model, idx = byte_model(), tokens(1, T)
    path = checkpoint(model, model={prefix + name: w for name, w in model.state_dict().items()})
    assert torch.equal(GPT.from_checkpoint(path)(idx)[0], model(idx)[0])


@pytest.mark.parametrize("change, message", [
    (lambda w: w.pop("norm.weight"), "lacks norm.weight"), (lambda w: w.pop("lm_head.weight"), "lacks lm_head.weight"),
    (lambda w: w.update(extra=w["norm.weight"]), "has extra, which this model has not"),
    (lambda w: w.update({"norm.weight": torch.ones(3)}), r"has norm.weight as \(3,\), not \(24,\)"),
    (lambda w: w.clear(), r"lacks .*, lacks .*, lacks .* \(and \d+ more\)$")])
def test_weights_that_do_not_fit_are_named(change, message, checkpoint):
    model = byte_model(tie_embeddings=False)
    weights = dict(model.state_dict())
    change(weights)
    with pytest.raises(ConfigError, match="the checkpoint .*" + message):
        GPT.from_checkpoint(checkpoint(model, model=weights))


def test_ema_weights(tmp_path, checkpoint, evaluated):
    model, average = byte_model(0), byte_model(1)
    path = checkpoint(model, ema=average.state_dict())
    (tmp_path / "a.txt").write_text("text")
    rows = [evaluated("text", path, tmp_path / "a.txt", "--weights", weights)[0] for weights in ("model", "ema")]
    for row, m in zip(rows, (model, average)):
        expected = text_losses(m, BYTE.encode("text"), BYTE.eot, T, 1, "cpu")[0].mean().item()
        assert row["loss"] == pytest.approx(expected, rel=1e-10)
    assert [r["weights"] for r in rows] == ["model", "ema"] and rows[0]["loss"] != rows[1]["loss"]


def test_run_folders_stand_for_their_latest_checkpoint(tmp_path):
    save(tmp_path / "run/ckpt/latest.pt", byte_model())
    assert load_checkpoint(tmp_path / "run")["step"] == 7
    with pytest.raises(ConfigError, match="no checkpoint at .*ckpt/latest.pt"):
        load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint at .*missing.pt"):
        load_checkpoint(tmp_path / "missing.pt")


def cut(size):
    return lambda data: data[:size] if size > 0 else data[:len(data) + size]


@pytest.mark.parametrize("damage", [cut(1), cut(3), cut(100), cut(1000), cut(-1), cut(-1000), cut(-20_000),
                                    lambda data: b"", lambda data: b"hello world\n" * 9, lambda data: data[50:],
                                    lambda data: bytes(range(255, 0, -1)), lambda data: pickle.dumps({"model": 3}, 2),
                                    lambda data: b'{"config": {}, "model": {}}'])
def test_files_that_are_no_checkpoint(damage, checkpoint):
    path = Path(checkpoint(byte_model()))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match="ckpt.pt is not a nanoDepth checkpoint") as e:
        load_checkpoint(path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("content", [3, [1], {"model": {}}, {"config": {}}])
def test_other_content_is_no_checkpoint(content, tmp_path):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match="ckpt.pt is not a nanoDepth checkpoint: it has no config and model"):
        load_checkpoint(tmp_path / "ckpt.pt")


def test_other_makers_checkpoints_lack_something(tmp_path, checkpoint):
    state = load_checkpoint(checkpoint(byte_model()))
    torch.save({key: state[key] for key in ("config", "model")}, tmp_path / "bare.pt")
    with pytest.raises(ConfigError, match="bare.pt is no checkpoint of train.py: it lacks step and tokenizer"):
        main(["sample", str(tmp_path / "bare.pt")])


def test_weights_of_another_pathway(checkpoint):
    path = checkpoint(byte_model(residual="add"), config=asdict(tiny_config(vocab_size=257, residual="mhar")))
    with pytest.raises(ConfigError, match="lacks pathway.gain, lacks pathway.query$"):
        GPT.from_checkpoint(path)


def test_checkpoints_of_a_run_hold_tensors_and_plain_values(corpus, tmp_path, evaluated):
    def plain(value):
        if isinstance(value, (dict, list, tuple)):
            return all(map(plain, [*value, *value.values()] if isinstance(value, dict) else value))
        return type(value) in (str, int, float, bool, type(None), torch.Tensor)

    settings = {"data_dir": corpus(), "out_dir": tmp_path / "run", "max_steps": 1, "batch_tokens": 32,
                "micro_batch_size": 1, "eval_tokens": 64, "ema_decay": 0.9, "device": "cpu", "vocab_size": 257,
                "seq_len": 16, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "d_model": 8, "d_ff": 8}
    (tmp_path / "tiny.py").write_text("")
    train.main([str(tmp_path / "tiny.py"), *(f"--{key}={value}" for key, value in settings.items())])
    files = sorted((tmp_path / "run/ckpt").glob("*.pt"))
    assert [f.name for f in files] == ["best.pt", "latest.pt", "step_00000001.pt"]
    assert all(plain(torch.load(f, weights_only=True)) for f in files)
    rows = [evaluated("loss", tmp_path / "run", "--weights", weights)[0] for weights in ("model", "ema")]
    assert rows[0]["step"] == 1 and rows[0]["loss"] != rows[1]["loss"]
    assert evaluated("sample", tmp_path / "run", "--prompt", "ab", "--max_new_tokens", 3)[0]["tokens"] <= 3


class Bomb:
    """What makes a folder when it is unpickled."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("write", [lambda bomb, path: torch.save({"model": {}, "config": bomb}, path),
                                   lambda bomb, path: path.write_bytes(pickle.dumps({"model": {}, "config": bomb}, 2)),
                                   lambda bomb, path: path.write_bytes(pickle.dumps(bomb, 2))])
def test_nothing_in_a_checkpoint_is_executed(write, tmp_path):
    write(Bomb(str(tmp_path / "executed")), tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match="ckpt.pt is not a nanoDepth checkpoint"):
        load_checkpoint(tmp_path / "ckpt.pt")
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "executed"))))
    assert (tmp_path / "executed").exists()                                # the bomb works


# ----------------------------------------------------------------------------------------------------------------------
# the command line


def command(*arguments, **env):
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, encoding="utf-8",
                          timeout=120, env=os.environ | env)


def test_samples_are_utf8_in_any_locale(tmp_path, checkpoint):
    path = checkpoint(chain_of("日é!"))
    done = command("-X", "utf8=0", "eval.py", "sample", path, "--prompt", "日", "--temperature", 0,
                   "--json", tmp_path / "out.json", LC_ALL="POSIX", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "日é!\n" and json.loads((tmp_path / "out.json").read_text("utf-8"))[0]["text"] == "é!"


def test_errors_are_one_line(tmp_path, checkpoint):
    path = Path(checkpoint(byte_model()))
    path.write_bytes(path.read_bytes()[:5000])
    for arguments, message in ((["loss", path], "is not a nanoDepth checkpoint, or is cut short"),
                               (["loss", tmp_path / "missing.pt"], "no checkpoint at")):
        done = command("eval.py", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith("eval.py: ") and message in done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# analyze.py


def test_curves(tmp_path, capsys):
    log = [{"step": s, "tokens": 100 * s, "loss": 5 / s, **({"val_loss": 4 / s} if s % 2 else {})} for s in range(1, 6)]
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    analyze.main(["curves", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (tmp_path / "a/curves.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "a/curves.json").read_text())
    assert list(numbers) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert numbers[str(tmp_path / "b")] == {"train": [[100 * s, 5 / s] for s in range(1, 6)],
                                            "val": [[100 * s, 4 / s] for s in (1, 3, 5)]}
    with pytest.raises(ConfigError, match="no run at .*c: it has no log.jsonl"):
        analyze.main(["curves", str(tmp_path / "c")])
    (tmp_path / "a/log.jsonl").write_text('{"step": 0, "val_loss": 5.0}\n')
    with pytest.raises(ConfigError, match="a/log.jsonl has no training step yet"):
        analyze.main(["curves", str(tmp_path / "a")])


def test_smoothing_starts_unbiased():
    assert analyze.smoothed([3.0] * 5) == pytest.approx([3.0] * 5)
    assert analyze.smoothed([1.0, 0.0]) == pytest.approx([1.0, 0.9 / 1.9])


@pytest.mark.parametrize("residual, heads", [("attnres", 1), ("mhar", 2), ("dar", 1)])
def test_routes(residual, heads, tmp_path, checkpoint, corpus):
    model, folder = byte_model(residual=residual), corpus()
    path = checkpoint(model, data_dir=folder)
    analyze.main(["routes", path, "--out", str(tmp_path / "r.png"), "--tokens", str(5 * T)])
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "r.json").read_text())
    data = TokenBin(folder, "val")
    idx = torch.from_numpy(data.windows(val_windows(data, T, 5 * T), T)[:, :-1])
    assert numbers["tokens"] == 5 * T
    assert len(numbers["weights"]) == len(numbers["sources"]) == 2 * model.config.n_layer + 1
    for weights, names, expected in zip(numbers["weights"], numbers["sources"], model.depth_weights(idx)):
        weights = np.array(weights)                                        # (stream, source, head)
        assert weights.shape == (2 if residual == "dar" else 1, len(names), heads)
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
        np.testing.assert_allclose(weights, expected.mean((2, 3)).numpy(), rtol=1e-6)


def test_routes_need_a_pathway_that_attends(checkpoint, corpus):
    with pytest.raises(ConfigError, match="residual='add' does not attend over depth"):
        analyze.main(["routes", checkpoint(byte_model(residual="add"), data_dir=corpus()), "--tokens", str(T)])
