"""Text -> bins: tokenizers against Hugging Face's library, documents, the split, bins, command line."""

import base64
import gzip
import json
import os
import pickle
import random
import re
import subprocess
import sys
import sysconfig
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
from requests.exceptions import ConnectionError

import prepare_data
import tokenizer as tokenizer_file
from bpe import train_bpe
from documents import Bad, digest, documents, find_files
from errors import DataError
from prepare_data import BinWriter, TokenBin, demo_files, main, prepare, split_of
from tokenizer import SPLIT_PATTERNS, load_tokenizer, restore_tokenizer

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("*.md")])
NASTY = ("IT'S we'LL they've 'ſ x'K \t\t  two\r\n\r\n \n  \x00\x1c\x1f\x85\xa0\u180e\u2028\u3000\ufeff 12345678 "
         "١٢٣٤ ½³ Ⅷ 𝟘𝟙𝟚𝟛 e\u0301 é Å \u1100\u1161\u11a8 각 ﬁ naïve "
         "日本語、テスト。 שלום مَرْحَبًا हिन्दी ไทย 👩‍👩‍👧‍👦🇩🇪👍🏽 a\u0300\u0316\u0327 ---===>>> __init__ "
         "aaaaaaaaaaaaaaaaaaaaa \U0010ffff \ue000 $%^&*()    ")


@pytest.fixture(scope="module")
def trained_ones():
    return {kind: train_bpe(kind, 1200) for kind in ("gpt2", "qwen", "llama3")}


@pytest.fixture
def edited(trained_ones, tmp_path):
    """edited(change, kind) -> path of a tokenizer.json whose parsed content `change` has altered."""
    def go(change=lambda spec: None, kind="gpt2"):
        spec = json.loads(trained_ones[kind].to_str())
        change(spec)
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        return path
    return go


def toy_ranks():
    """All single bytes, then runs of 'a' that double up to 64."""
    return {**{bytes([b]): b for b in range(256)}, **{b"a" * 2 ** i: 255 + i for i in range(1, 7)}}


def write_ranks(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


@pytest.fixture
def named(monkeypatch):
    """named(eot) makes the tiktoken encoding "toy" known, its end-of-text id as given."""
    def go(eot):
        tiktoken.list_encoding_names()                                    # fills the registry
        spec = {"name": "toy", "pat_str": SPLIT_PATTERNS["gpt2"], "mergeable_ranks": toy_ranks(),
                "special_tokens": {"<|endoftext|>": eot}}
        monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "toy", lambda: spec)
        monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
        return load_tokenizer("toy")
    return go


@pytest.fixture
def corpus(tmp_path):
    """corpus(texts) -> files d000.txt, d001.txt, ...; by default 60 unlike documents."""
    def go(texts=None, start=0):
        texts = [f"document number {i} of many" for i in range(start, start + 60)] if texts is None else texts
        paths = [tmp_path / f"d{start + i:03d}.txt" for i in range(len(texts))]
        for path, text in zip(paths, texts):
            path.write_text(text, encoding="utf-8")
        return paths
    return go


def write_texts(folder, n=40):
    """n short documents, so that neither split is empty."""
    paths = [folder / f"short{i}.txt" for i in range(n)]
    for i, path in enumerate(paths):
        path.write_text(f"short {i}")
    return paths


def prepared(files, out, tokenizer=None, val_permille=200, **kw):
    return prepare(files, tokenizer or load_tokenizer("byte"), out, val_permille, **kw)


def run(*arguments):
    """In this process, which knows what is monkeypatched."""
    main([str(a) for a in arguments] + ["--workers", "1"])


def texts_of(folder, *splits):
    """The documents of a split, decoded; of both, sorted, if none is named."""
    if not splits:
        return sorted(texts_of(folder, "train") + texts_of(folder, "val"))
    data = TokenBin(folder, *splits)
    tokenizer, ids = data.tokenizer(), np.array(data.tokens)
    assert ids[-1] == tokenizer.eot
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)[:-1]
    return [tokenizer.decode(part[:-1]) for part in parts]


# ---- tokenizers


def assert_same_ids(path, hf):
    ours, rng = load_tokenizer(str(path)), random.Random(0)
    repetitive = "".join(rng.choice("aaaab-=  \n") for _ in range(20_000))
    for text in [*(p.read_text(encoding="utf-8") for p in SOURCES), NASTY, NASTY[::-1], repetitive]:
        assert ours.encode(text).tolist() == hf.encode(text, add_special_tokens=False).ids
    return ours


@pytest.mark.parametrize("kind, eot", [("gpt2", "<|endoftext|>"), ("qwen", "<|endoftext|>"),
                                       ("llama3", "<|end_of_text|>")])
def test_ids_are_hugging_faces(trained_ones, edited, kind, eot):
    hf = trained_ones[kind]
    ours = assert_same_ids(edited(kind=kind), hf)
    assert ours.eot == hf.token_to_id(eot) and ours.n_vocab == hf.get_vocab_size() > 1000
    assert ours.decode(ours.encode("naïve 日本 👍🏽")) == "naïve 日本 👍🏽"
    assert ours.decode([ours.eot]) == ""


@pytest.mark.parametrize("write", [" ".join, list], ids=["string", "pair"])
def test_both_spellings_of_merges(trained_ones, edited, write):
    def change(spec):
        pairs = [m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"]]
        spec["model"]["merges"] = [write(pair) for pair in pairs]
    assert_same_ids(edited(change, "qwen"), trained_ones["qwen"])


def test_every_way_to_cut_a_token_as_a_merge(edited):
    """Vocabularies converted from .tiktoken files, as Llama 3's, list them all."""
    def change(spec):
        vocab = spec["model"]["vocab"]
        cuts = [(i, vocab[t[:k]], vocab[t[k:]], t[:k], t[k:]) for t, i in vocab.items() for k in range(1, len(t))
                if t[:k] in vocab and t[k:] in vocab]
        assert len(cuts) > len(spec["model"]["merges"])
        spec["model"]["merges"] = [cut[3:] for cut in sorted(cuts)]

    path = edited(change, "llama3")
    hf = tokenizers.Tokenizer.from_file(str(path))
    hf.encode_special_tokens = True
    assert_same_ids(path, hf)


def set_in(*keys, value):
    def change(spec):
        for key in keys[:-1]:
            spec = spec[key]
        spec[keys[-1]] = value
    return change


def token_without_merge(spec):
    last = "".join(spec["model"]["merges"].pop())
    assert last in spec["model"]["vocab"]


def add_token(spec, content):
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": 2000, "content": content, "special": False})


SPLIT = "pre_tokenizer", "pretokenizers", 0
REFUSED = {
    "WordPiece": (set_in("model", "type", value="WordPiece"), "model.type is 'WordPiece'"),
    "byte_fallback": (set_in("model", "byte_fallback", value=True), "byte_fallback"),
    "dropout": (set_in("model", "dropout", value=0.1), "dropout"),
    "end of word suffix": (set_in("model", "end_of_word_suffix", value="</w>"), "end_of_word_suffix"),
    "subword prefix": (set_in("model", "continuing_subword_prefix", value="##"), "continuing_subword_prefix"),
    "prefix space": (set_in("pre_tokenizer", "add_prefix_space", value=True), "prefix space"),
    "no splitting": (set_in("pre_tokenizer", "use_regex", value=False), "does not split"),
    "no pre_tokenizer": (set_in("pre_tokenizer", value=None), "does not end in ByteLevel"),
    "metaspace": (set_in("pre_tokenizer", value={"type": "Metaspace"}), "does not end in ByteLevel"),
    "lower case": (set_in("normalizer", value={"type": "Lowercase"}), "normalizer is {'type': 'Lowercase'}"),
    "missing byte": (lambda spec: spec["model"]["vocab"].pop("a"), "lacks single bytes"),
    "merges out of order": (lambda spec: spec["model"]["merges"].reverse(), "not in the order"),
    "token without merge": (token_without_merge, "no merge"),
    "no end of text": (set_in("added_tokens", value=[]), "no end-of-text token", "qwen"),
    "other split": (set_in(*SPLIT, "behavior", value="Removed"), "its pre_tokenizer is", "qwen"),
    "bad regex": (set_in(*SPLIT, "pattern", "Regex", value="("), "arsing", "qwen"),
    "white space": (lambda spec: add_token(spec, "    "), "['    '] are added tokens"),
    "no merges": (lambda spec: spec["model"].pop("merges"), "KeyError: 'merges'"),
    "foreign merge": (lambda spec: spec["model"]["merges"].append("q zzz"), "KeyError: 'qzzz'"),
    "no model": (set_in("model", value="BPE"), "AttributeError"),
    "a list": (None, "not a tokenizer file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tokenizer_files_are_refused_with_the_reason(edited, tmp_path, name):
    change, reason, *kind = REFUSED[name]
    path = edited(change, *kind) if change else tmp_path / "tokenizer.json"
    if change is None:
        path.write_text("[1, 2]")
    with pytest.raises(DataError) as e:
        load_tokenizer(str(path))
    assert str(path) in str(e.value) and reason in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("kept", [0, 0.5, 0.999])
def test_cut_tokenizer_json(edited, kept):
    path = edited()
    path.write_bytes(path.read_bytes()[:int(kept * path.stat().st_size)])
    with pytest.raises(DataError, match="tokenizer.json is not a tokenizer file that can be read"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k_base", r"\S+|\s+"])
def test_tiktoken_file(tmp_path, pattern):
    path = write_ranks(tmp_path / "toy.tiktoken", toy_ranks())
    ours = load_tokenizer(str(path), pattern)
    theirs = tiktoken.Encoding("theirs", pat_str=SPLIT_PATTERNS.get(pattern, pattern), mergeable_ranks=toy_ranks(),
                               special_tokens={})
    assert ours.encode(NASTY).tolist() == theirs.encode_ordinary(NASTY)
    assert (ours.n_vocab, ours.eot) == (263, 262) and ours.decode(ours.encode(NASTY)) == NASTY
    assert restore_tokenizer(ours.meta(), ours.file).encode(NASTY).tolist() == ours.encode(NASTY).tolist()


def test_tiktoken_file_needs_a_split_pattern(tmp_path):
    path = write_ranks(tmp_path / "toy.tiktoken", toy_ranks())
    with pytest.raises(DataError, match="holds no split pattern: add --split-pattern gpt2|cl100k_base or a regex"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("damage, words", [
    (lambda data: data[:-5], "cut short"), (lambda data: data[:400], "cut short"), (lambda data: b"", "cut short"),
    (lambda data: data.replace(b" 100\n", b" 1000\n"), "ranks must be 0 .. n-1"),
    (lambda data: b"hello\n" + data, "base64 rank")])
def test_broken_tiktoken_files(tmp_path, damage, words):
    path = write_ranks(tmp_path / "toy.tiktoken", toy_ranks())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=words):
        load_tokenizer(str(path), "gpt2")


def test_unknown_tokenizer_names_the_known():
    with pytest.raises(DataError, match="unknown tokenizer 'no/such': byte, .*gpt2"):
        load_tokenizer("no/such")


def test_named_encoding(named, corpus, tmp_path):
    named(262)
    run("--input", *corpus(), "--tokenizer", "toy", "--out", tmp_path / "out", "--val-permille", 200)
    assert TokenBin(tmp_path / "out", "train").tokenizer().eot == 262
    assert "document number 7 of many" in texts_of(tmp_path / "out")


def unreachable(url):
    raise ConnectionError(f"cannot resolve {url}")


@pytest.mark.parametrize("read_file", [unreachable, lambda url: b"<html>log in</html>"], ids=["offline", "damaged"])
@pytest.mark.parametrize("cached", [False, True], ids=["empty cache", "cut file in cache"])
def test_encoding_that_cannot_be_fetched(monkeypatch, tmp_path, read_file, cached):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    asked = []

    def recorded(url):
        asked.append(url)
        return read_file(url)
    monkeypatch.setattr(tiktoken.load, "read_file", recorded)
    if cached:                                                            # under the very name tiktoken looks for
        monkeypatch.setattr(tiktoken.load, "check_hash", lambda *args: False)
        with pytest.raises(DataError):
            load_tokenizer("cl100k_base")
        (tmp_path / tiktoken.load.hashlib.sha1(asked.pop().encode()).hexdigest()).write_bytes(b"IQ== 0\nIg")
    with pytest.raises(DataError) as e:
        load_tokenizer("cl100k_base")
    assert asked and "TIKTOKEN_CACHE_DIR" in str(e.value) and "--tokenizer byte" in str(e.value)
    assert "\n" not in str(e.value)


def test_qwen3_is_fetched_once_and_checked(trained_ones, edited, monkeypatch, tmp_path):
    """From a hub of our own; then from where it was put; and refused when it is another file."""
    import huggingface_hub
    toy, calls = edited(kind="qwen"), []

    def download(repository, name, local_dir):
        calls.append(repository)
        local_dir.mkdir(parents=True)
        (local_dir / name).write_bytes(toy.read_bytes())

    monkeypatch.setattr(tokenizer_file, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(DataError, match="kept/qwen3/tokenizer.json is not the tokenizer of Qwen/Qwen3-0.6B, or is damaged"):
        load_tokenizer("qwen3")
    monkeypatch.setitem(tokenizer_file.HUB, "qwen3", ("Qwen/Qwen3-0.6B", load_tokenizer(str(toy)).sha256))
    assert load_tokenizer("qwen3").n_vocab == trained_ones["qwen"].get_vocab_size() and calls == ["Qwen/Qwen3-0.6B"]
    monkeypatch.setattr(tokenizer_file, "KEPT", tmp_path / "elsewhere")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **kw: unreachable("hub"))
    with pytest.raises(DataError, match="not at .*elsewhere/qwen3/tokenizer.json and cannot be fetched .*put the tokenizer.json of Qwen"):
        load_tokenizer("qwen3")


def test_a_changed_tokenizer_file_is_noticed(edited, corpus, tmp_path):
    run("--input", *corpus(), "--tokenizer", edited(), "--out", tmp_path / "out", "--val-permille", 200)
    data = TokenBin(tmp_path / "out", "train")
    assert data.tokenizer().file == edited().read_bytes()                 # the folder has a copy of its own

    def shorter(spec):
        spec["model"]["vocab"].pop("".join(spec["model"]["merges"].pop()))
    (tmp_path / "out" / "tokenizer.json").write_bytes(edited(shorter).read_bytes())
    with pytest.raises(DataError, match="'tokenizer.json' found here is not the one the data was made with"):
        data.tokenizer()


@pytest.mark.parametrize("change", [
    set_in("normalizer", value=None), set_in("normalizer", "type", value="NFKC"),
    set_in(*SPLIT, "pattern", "Regex", value=r"\s+"), set_in("added_tokens", 1, "id", value=1500)],
    ids=["no normalizer", "other normalizer", "other split", "other ids"])
def test_the_hash_covers_all_that_decides_the_ids(edited, change):
    before = load_tokenizer(str(edited(kind="qwen"))).sha256
    assert load_tokenizer(str(edited(kind="qwen"))).sha256 == before
    assert load_tokenizer(str(edited(change, "qwen"))).sha256 != before


def test_tiktoken_file_cut_between_lines_is_noticed(corpus, tmp_path):
    """Fewer ranks are a tokenizer too; only the hash tells."""
    path = write_ranks(tmp_path / "toy.tiktoken", toy_ranks())
    meta = load_tokenizer(str(path), "gpt2").meta()
    shorter = b"".join(path.read_bytes().splitlines(keepends=True)[:-1])
    with pytest.raises(DataError, match="not the one the data was made with"):
        restore_tokenizer(meta, shorter)


def test_unknown_ids_decode_to_a_mark(named):
    assert load_tokenizer("byte").decode([65, 257, 66, 256, 67]) == "A\ufffdBC"
    assert named(300).decode([65, 280, 66, 301, 300, 67]) == "A\ufffdB\ufffdC"


def test_a_long_run_of_one_letter(tmp_path):
    ours = load_tokenizer(str(write_ranks(tmp_path / "toy.tiktoken", toy_ranks())), "gpt2")
    ids = ours.encode("a" * 1_000_000)
    assert ids.tolist() == [261] * (1_000_000 // 64)


@pytest.mark.parametrize("piece", [" ", "\n", " \t"])
def test_a_long_run_of_white_space(edited, piece):
    ours, text = load_tokenizer(str(edited())), "x" + piece * 1_100_000 + "x"
    assert ours.decode(ours.encode(text)) == text


def test_only_long_runs_of_white_space_are_cut():
    text = "a b  c   d" * 3 + "     e "
    assert list(tokenizer_file.parts(text, 3)) == ["a b  c   d" * 3 + "   ", "  e "]
    assert tokenizer_file.parts(text, 5) == tokenizer_file.parts(text, 10**6) == [text]
    assert tokenizer_file.parts("", 3) == [""]


# ---- documents


def test_special_token_text_is_text(edited, corpus, tmp_path):
    texts = [f"x{i} <|endoftext|> y" for i in range(40)]
    for tokenizer in (load_tokenizer("byte"), load_tokenizer(str(edited()))):
        out = tmp_path / tokenizer.name.replace(".json", "")
        prepared(corpus(texts), out, tokenizer)
        assert texts_of(out) == sorted(texts)
        separators = sum((np.array(TokenBin(out, s).tokens) == tokenizer.eot).sum() for s in ("train", "val"))
        assert separators == len(texts)


def test_all_kinds_of_files(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    expected = {}
    for i in range(10):
        for suffix in (".txt", ".md", ".py"):
            expected[tmp_path / "in" / "deep" / f"{i}{suffix}"] = f"text {i}{suffix}\r\n"
    for path, text in expected.items():
        path.write_bytes(text.encode())
    (tmp_path / "in" / "ignored.bin").write_bytes(b"\xff")
    rows = [f"row {i}" for i in range(10)]
    (tmp_path / "in" / "rows.jsonl").write_text("\n\n".join(json.dumps({"content": r}) for r in rows))
    run("--input", tmp_path / "in", "--out", tmp_path / "out", "--text-key", "content", "--val-permille", 300)
    assert texts_of(tmp_path / "out") == sorted([*expected.values(), *rows])


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert [piece.text for piece in documents(tmp_path / "a.txt", "text")] == ["hello"]
    assert [piece.text for piece in documents(tmp_path / "b.jsonl", "text")] == ["one", "two"]


@pytest.mark.parametrize("line, words", [
    ('{"text": "cut he', "not JSON"), ('"text"', "no text under 'text'"), ("42", "no text under 'text'"),
    ("[]", "no text"), ("{}", "no text"), ('{"text": null}', "no text"), ('{"text": 3}', "no text"),
    ('{"Text": "a"}', "no text"),
    ('{"text": "\\ud800"}', "half of a surrogate pair"), ("[" * 100_000, "not JSON"),
    ('{"n": ' + "1" * 5000 + "}", "not JSON")], ids=lambda text: text[:30])
def test_bad_lines_are_named(tmp_path, line, words):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "fine"}\n' + line + '\n{"text": "fine too"}\n')
    with pytest.raises(DataError, match=words) as e:
        prepared([path], tmp_path / "out")
    assert f"{path}:2: " in str(e.value) and "\n" not in str(e.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 \(byte 2\)"):
        prepared([tmp_path / "a.txt"], tmp_path / "out")
    with pytest.raises(DataError, match=r"b\.jsonl:2: not UTF-8"):
        prepared([tmp_path / "b.jsonl"], tmp_path / "out")


def test_empty_texts_are_skipped_and_counted(corpus, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": ""}\n{"text": "ok"}\n')
    meta = prepared([*corpus(["", "\n"]), *corpus(start=2), rows], tmp_path / "out")
    assert meta["empty_documents"] == 2 and sum(s["documents"] for s in meta["splits"].values()) == 62
    texts = texts_of(tmp_path / "out")
    assert "" not in texts and "ok" in texts and "\n" in texts
    said = capsys.readouterr().out
    for split, counts in meta["splits"].items():
        assert f"{split}.bin: {counts['tokens']:,} tokens of {counts['documents']:,} documents" in said
    assert "2 empty documents skipped" in said


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_empty_input_leaves_no_bin(corpus, tmp_path, texts):
    files = corpus(texts)
    with pytest.raises(DataError, match="no tokens written to train: the input has 0 documents that are not empty"):
        prepared(files, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("name, words", [
    ("missing.txt", "no such file or folder"), ("empty_dir", "holds no .txt, .md, source code, .jsonl"),
    ("image.png", "cannot read .png; known: .txt"), ("README", "files without an ending")])
def test_inputs_that_cannot_be_used(tmp_path, name, words):
    (tmp_path / "empty_dir").mkdir()
    for file in ("image.png", "README"):
        (tmp_path / file).write_text("x")
    with pytest.raises(DataError, match=words) as e:
        find_files([tmp_path / name])
    assert str(tmp_path / name) in str(e.value)


def test_each_file_once_in_a_fixed_order(corpus, tmp_path):
    files = corpus(["b", "a"])
    assert find_files([files[1], tmp_path, files[0]]) == [files[1], files[0]]


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".jsonl.gz"])
def test_memory_does_not_grow_with_the_input(tmp_path, ending):
    """Rows of a file, and one document of 12 MB and of 48 MB."""
    peaks = []
    for size in (12, 48):
        path = tmp_path / f"{size}{ending}"
        write_text = gzip.open if ending.endswith(".gz") else open
        with write_text(path, "wt") as f:
            for i in range(size * 100):
                text = f"{i} " * 2000 + "\nline"
                f.write(json.dumps({"text": text}) + "\n" if "json" in ending else text)
        tracemalloc.start()
        prepared([path, *write_texts(tmp_path)], tmp_path / f"out{size}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 90e6


def test_demo(monkeypatch, tmp_path):
    assert Path(json.__file__) in demo_files() and not [p for p in demo_files() if "site-packages" in p.parts]
    library = tmp_path / "lib"
    (library / "site-packages").mkdir(parents=True)
    (library / "site-packages" / "no.py").write_text("no")
    (library / "latin.py").write_bytes(b"# \xe9")
    for i in range(300):
        (library / f"m{i}.py").write_text(f"x = {i}")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    monkeypatch.chdir(tmp_path)
    run("--demo")
    assert texts_of("data/demo") == sorted(f"x = {i}" for i in range(300))


# ---- the split


def key(text):
    return digest(text.encode()).digest()


def test_split_is_by_document_and_copies_land_on_one_side(corpus, tmp_path):
    texts = [f"word{i} " * 200 for i in range(50)] * 2
    meta = prepared(corpus(texts), tmp_path / "out", val_permille=300)
    train, val = (texts_of(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts) and not set(train) & set(val)
    assert meta["splits"]["val"]["documents"] == len(val) > 0
    for split, side in (("train", train), ("val", val)):
        assert {split_of(key(t), 300) for t in side} == {split}


def test_share_of_val():
    texts = [key(f"text {i}") for i in range(20_000)]
    for permille in (10, 200):
        assert sum(split_of(t, permille) == "val" for t in texts) / 20_000 == pytest.approx(permille / 1000, rel=0.2)


def test_seeds_hold_out_other_documents(corpus, tmp_path):
    """With a fifth held out, five seeds hold out each document once."""
    held = []
    for seed in range(5):
        run("--input", *corpus(), "--out", tmp_path / f"out{seed}", "--val-permille", 200, "--seed", seed)
        held += texts_of(tmp_path / f"out{seed}", "val")
    assert sorted(held) == sorted(f"document number {i} of many" for i in range(60))


def test_adding_files_moves_no_document(corpus, tmp_path):
    few, more = corpus(), corpus(start=60)
    prepared(few, tmp_path / "few")
    prepared(more[::-1] + few, tmp_path / "all")
    for split in ("train", "val"):
        assert set(texts_of(tmp_path / "few", split)) < set(texts_of(tmp_path / "all", split))


@pytest.mark.parametrize("permille, empty", [(1, "val"), (999, "train")])
def test_an_empty_side_is_refused_at_preparation(corpus, tmp_path, permille, empty):
    text = next(t for t in map(str, range(99)) if split_of(key(t), permille) != empty)
    files = corpus([text])
    with pytest.raises(DataError, match=f"no tokens written to {empty}: the input has 1 documents .* --val-permille"):
        prepared(files, tmp_path / "out", val_permille=permille)
    assert sorted(tmp_path.iterdir()) == files


# ---- bins


@pytest.mark.parametrize("eot, dtype", [(65535, "uint16"), (65536, "uint32"), (151643, "uint32")])
def test_dtype_follows_the_largest_id(named, corpus, tmp_path, eot, dtype):
    meta = prepared(corpus(), tmp_path / "out", named(eot))
    assert meta["dtype"] == dtype and meta["tokenizer"]["n_vocab"] == eot + 1
    for split in ("train", "val"):
        data = TokenBin(tmp_path / "out", split)
        assert data.max_id == eot == data.tokens[-1] == data.tokens.max()
        assert data.windows([data.n_windows(4) - 1], 4).dtype == np.int64


def test_an_id_that_does_not_fit_is_an_error(tmp_path):
    writer = BinWriter(tmp_path / "a.bin", "uint16")
    writer.add(np.array([0, 65535], dtype=np.uint32))
    with pytest.raises(DataError, match="token id 65536 does not fit uint16"):
        writer.add(np.array([1, 65536], dtype=np.uint32))
    writer.add(np.array([7], dtype=np.uint32))
    writer.sync()
    counts = writer.counts()
    assert (tmp_path / "a.bin").stat().st_size == 6
    assert (counts["tokens"], counts["documents"], counts["max_id"]) == (3, 2, 65535)


def test_ids_above_16_bits_come_back(tmp_path):
    ids = np.array([65535, 65536, 151643], dtype=np.uint32)
    writer = BinWriter(tmp_path / "train.bin", "uint32")
    writer.add(ids)
    writer.sync()
    write_meta(tmp_path, writer.tokens, "uint32", 151643)
    assert TokenBin(tmp_path, "train").windows([0], 2).tolist() == [ids.tolist()]


def write_meta(folder, n_tokens, dtype, max_id=0):
    counts = {"tokens": n_tokens, "documents": 1, "max_id": max_id, "sha256": ""}
    (folder / "meta.json").write_text(json.dumps({"format": 1, "dtype": dtype, "splits": {"train": counts}}))


@pytest.mark.parametrize("dtype, size", [("uint16", 12), ("uint32", 6), ("uint16", 7), ("uint16", 0), ("uint16", None)])
def test_a_bin_of_another_size_is_refused(tmp_path, dtype, size):
    write_meta(tmp_path, 3, dtype)
    if size is not None:
        (tmp_path / "train.bin").write_bytes(bytes(size))
    message = f"train.bin has {size or 0} bytes, but meta.json says 3 tokens of {dtype}, .*: delete .* prepare it again"
    with pytest.raises(DataError, match=message):
        TokenBin(tmp_path, "train")


@pytest.mark.parametrize("content, words", [
    (None, "no data in .*--demo"), ("{", "is not a meta.json"), ("[]", "is not a meta.json"),
    ("{}", "is not a meta.json"), ('{"format": 1, "dtype": "uint16"}', "is not a meta.json"), (pickle.dumps({"format": 1}), "is not a meta.json"),
    ('{"format": 2}', "has data format 2, this version reads 1: delete it and prepare it again")])
def test_meta_that_cannot_be_read(tmp_path, content, words):
    if content is not None:
        (tmp_path / "meta.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words):
        TokenBin(tmp_path, "train")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what memory is")
def test_reading_a_bin_needs_no_memory_of_its_own(tmp_path):
    """Pages of the mapped file may stay in memory, where the system can drop them; anonymous memory must not grow."""
    def anonymous():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024      # MiB

    n = 100_000_000
    with (tmp_path / "train.bin").open("wb") as f:
        f.truncate(2 * n)
    write_meta(tmp_path, n, "uint16")
    data, rng = TokenBin(tmp_path, "train"), np.random.default_rng(0)
    windows = rng.integers(data.n_windows(1024), size=(2000, 8))
    data.windows(windows[0], 1024)
    before = anonymous()
    for batch in windows:
        data.windows(batch, 1024)
    assert anonymous() - before < 20


def test_last_window_beyond_4_gib(tmp_path):
    n = 2 ** 31 + 40                                                      # of uint16
    with (tmp_path / "train.bin").open("wb") as f:
        f.truncate(2 * n)                                                 # a sparse file
        f.seek(2 * (n - 26))
        f.write(np.arange(1000, 1026, dtype=np.uint16).tobytes())
    write_meta(tmp_path, n, "uint16")
    data = TokenBin(tmp_path, "train")
    last = data.n_windows(25) - 1
    start = last * 25
    assert start * 2 > 2 ** 32 and start + 26 <= n < start + 51           # nothing but the rest lies after it
    expected = [1000 + i - (n - 26) if i >= n - 26 else 0 for i in range(start, start + 26)]
    assert data.windows(np.array([last], dtype=np.int32), 25).tolist() == [expected] and expected[-1] > 1000


@pytest.mark.parametrize("n, starts", [(5, [0]), (8, [0]), (9, [0, 4]), (12, [0, 4]), (13, [0, 4, 8])])
def test_windows(tmp_path, n, starts):
    np.arange(n, dtype=np.uint16).tofile(tmp_path / "train.bin")
    write_meta(tmp_path, n, "uint16")
    data = TokenBin(tmp_path, "train")
    assert data.n_windows(4) == len(starts)
    assert data.windows(range(len(starts)), 4).tolist() == [list(range(s, s + 5)) for s in starts]


@pytest.mark.parametrize("n", [1, 3, 4])
def test_too_few_tokens_for_a_window(tmp_path, n):
    np.arange(n, dtype=np.uint16).tofile(tmp_path / "train.bin")
    write_meta(tmp_path, n, "uint16")
    with pytest.raises(DataError, match=rf"train.bin has {n} tokens, too few for one window of seq_len=4 \(needs 5\)"):
        TokenBin(tmp_path, "train").n_windows(4)


# ---- the folder


def test_same_bytes_twice(corpus, tmp_path):
    files = corpus()
    assert prepared(files, tmp_path / "a") == prepared(files, tmp_path / "b")
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_meta_tells_what_the_bins_hold(corpus, tmp_path):
    files = corpus()
    meta = prepared(files, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "meta.json").read_text()) == meta
    assert meta["tokenizer"]["n_vocab"] == 257 and meta["tokenizer"]["eot"] == 256
    (source,) = meta["sources"]
    assert [i["path"] for i in source["inputs"]] == [str(p) for p in files]
    assert source["text_bytes"] == sum(p.stat().st_size for p in files) and source["weight"] is None
    for split, counts in meta["splits"].items():
        data = TokenBin(tmp_path / "out", split)
        assert counts["tokens"] == len(data.tokens) and counts["documents"] == len(texts_of(tmp_path / "out", split))
        assert counts["max_id"] == data.tokens.max() == 256
        assert counts["sha256"] == prepare_data.file_hash(data.path)


def test_the_same_again_is_kept(corpus, tmp_path, capsys):
    files = corpus()
    prepared(files, tmp_path / "out")
    before = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    prepared(files, tmp_path / "out")
    assert "is there already" in capsys.readouterr().out
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == before


def test_other_inputs_over_a_folder_are_refused(corpus, named, tmp_path):
    files = corpus()
    prepared(files, tmp_path / "out")
    before = (tmp_path / "out" / "train.bin").read_bytes()
    cases = {"sources": dict(files=files[1:]), "settings": dict(files=files, val_permille=300),
             "dtype and tokenizer": dict(files=files, tokenizer=named(70_000))}
    for what, changed in cases.items():
        with pytest.raises(DataError, match=f"was made from other {what}: choose another --out, or delete it first"):
            prepared(out=tmp_path / "out", **changed)
    files[3].write_text("document number 3 of Many", encoding="utf-8")    # as long as before
    with pytest.raises(DataError, match="was made from other sources"):
        prepared(files, tmp_path / "out")
    assert (tmp_path / "out" / "train.bin").read_bytes() == before


def test_a_foreign_folder_is_left_alone(corpus, tmp_path):
    files = corpus()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    for out in (tmp_path / "out", files[0]):
        with pytest.raises(DataError, match="exists and is no data folder"):
            prepared(files, out)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "x"
    (tmp_path / "empty").mkdir()
    prepared(files, tmp_path / "empty")                                   # an empty folder is free to take


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_and_failing_runs_leave_nothing(corpus, tmp_path, error):
    files, tokenizer, calls = corpus(), load_tokenizer("byte"), []

    def encode(text, original=tokenizer.encode):
        calls.append(text)
        if len(calls) == 30:
            raise error
        return original(text)
    tokenizer.encode = encode
    with pytest.raises(error if isinstance(error, type) else type(error)):
        prepared(files, tmp_path / "out", tokenizer)
    assert len(calls) == 30 and sorted(tmp_path.iterdir()) == files


def test_what_a_killed_run_left_is_done_anew(corpus, tmp_path):
    files = corpus()
    (tmp_path / "out.partial").mkdir()
    for name in ("train.bin", "other.bin"):
        (tmp_path / "out.partial" / name).write_bytes(b"junk")
    prepared(files, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["meta.json", "train.bin", "val.bin"]
    assert not (tmp_path / "out.partial").exists() and len(texts_of(tmp_path / "out", "train")) > 30


@pytest.mark.parametrize("name", ["meta.json", "train.bin.json", "gpt2.json"])
def test_a_tokenizer_file_of_any_name(name, edited, corpus, tmp_path):
    path = edited().rename(tmp_path / name)
    tokenizer = load_tokenizer(str(path))
    prepare(corpus(), tokenizer, tmp_path / "out", val_permille=200)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    assert TokenBin(tmp_path / "out", "val").tokenizer().sha256 == tokenizer.sha256
    bare = path.rename(tmp_path / "byte")
    with pytest.raises(DataError, match="unknown tokenizer .*tokenizer.json or .tiktoken file"):
        load_tokenizer(str(bare))


# ---- the command line


def command(*args, **env):
    return subprocess.run([sys.executable, "-X", "utf8=0", str(ROOT / "prepare_data.py"), *map(str, args)], text=True,
                          capture_output=True, timeout=120, env=os.environ | env)


def test_works_in_a_locale_without_unicode(tmp_path):
    (tmp_path / "in").mkdir()
    texts = [f"naïve 日本 {i}" for i in range(40)]
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"日{i}.txt").write_text(text, encoding="utf-8")
    result = command("--input", tmp_path / "in", "--out", tmp_path / "out", "--val-permille", 200,
                     LC_ALL="POSIX", PYTHONCOERCECLOCALE="0")
    assert result.returncode == 0, result.stderr
    assert texts_of(tmp_path / "out") == sorted(texts)


def test_needs_nothing_optional(tmp_path, corpus):
    code = ("import sys; sys.modules |= dict.fromkeys(['datasets', 'pyarrow', 'zstandard', 'tokenizers', "
            "'transformers', 'torch', 'matplotlib']); import prepare_data; prepare_data.main(sys.argv[1:])")
    result = subprocess.run([sys.executable, "-c", code, "--input", *corpus(), "--out", tmp_path / "out",
                             "--val-permille", "200"], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "tokenizer byte: ids below 257, largest used 256; 0 empty" in result.stdout


def test_refusals_are_one_line(tmp_path):
    result = command("--input", tmp_path / "missing.txt", "--out", tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr == f"prepare_data.py: no such file or folder: {tmp_path / 'missing.txt'}\n"

    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    result = command("--input", path, "--out", tmp_path / "out")
    assert result.returncode == 1 and result.stderr.count("\n") == 1     # no bar, as this is no terminal
    assert result.stderr.startswith(f"prepare_data.py: {path}:2: not JSON")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments, words", [
    ([], "give one of --demo, --input"), (["--demo", "--input", "a.txt"], "give one of --demo, --input"),
    (["--input", "a.txt", "--source", "a=b:1"], "give one of --demo, --input"),
    (["--demo", "--workers", "0"], "--workers must be at least 1, not 0"), (["--demo", "--limit-tokens", "0"], "--limit-tokens must be"),
    (["--input", "a.txt"], "--out is missing"), (["--demo", "--val-permille", "0"], "between 1 and 999, not 0"),
    (["--demo", "--val-permille", "1000"], "between 1 and 999, not 1000")])
def test_bad_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as e:
        main(arguments)
    assert e.value.code == 2 and words in capsys.readouterr().err
