"""convert.py against transformers, in both directions; and training that starts from what it made."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import convert
import eval as eval_file
import train
from checkpoints import load_checkpoint, read
from convert import from_hf, to_hf
from errors import ConfigError
from helpers import assert_close, gradients, rel_rms, tokens
from model import GPT, ModelConfig
from test_body import LLAMA3, WideRMSNorm
from test_ddp import torchrun
from test_train import ROOT, config_file, corpus, log_of, losses, run  # noqa: F401 (fixtures)
from tokenizer import byte_tokenizer_json, load_tokenizer

SIZE = dict(vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, rms_norm_eps=1e-5)
MODELS = {
    "qwen3 tied": (Qwen3ForCausalLM, Qwen3Config, dict(tie_word_embeddings=True, head_dim=12, rope_parameters={
        "rope_type": "default", "rope_theta": 1e6})),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(tie_word_embeddings=False, head_dim=8)),
    "llama": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=False, rope_parameters=LLAMA3 | {"rope_theta": 100.0})),
    "llama tied": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True, num_key_value_heads=4)),
}


def saved(folder, name, dtype=torch.float32, max_shard_size="20KB", **changes):
    """A random model of transformers, saved by transformers, with the byte tokenizer -> the model."""
    model_class, config_class, details = MODELS[name]
    torch.manual_seed(1)
    model = model_class(config_class(**SIZE | details | changes, attn_implementation="sdpa"))
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else p.shape[-1] ** -0.5) + ("norm" in parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer.json").write_bytes(byte_tokenizer_json())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)       # its rotary table stays float32


def norms_replaced(model, make):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, make(child))
    return model


class TorchRMSNorm(WideRMSNorm):
    """torch's own kernel, which rounds once; that of transformers rounds twice in bfloat16."""

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


# ---- both directions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path, name, dtype):
    theirs = saved(tmp_path / "hf", name, dtype)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    from_hf(str(tmp_path / "hf"), tmp_path / "base.pt")
    ours, idx = GPT.from_checkpoint(tmp_path / "base.pt"), tokens(3, 50, vocab=257)
    assert all(p.dtype == dtype for p in ours.parameters())
    with torch.no_grad():
        if dtype == torch.bfloat16:
            assert torch.equal(ours(idx)[0], norms_replaced(theirs, TorchRMSNorm)(idx).logits)
        expected = norms_replaced(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").double(), WideRMSNorm)(idx).logits
        assert (ours.double()(idx)[0] - expected).abs().max() < 1e-10 and expected.std() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_the_same_files(tmp_path, name, dtype):
    saved(tmp_path / "hf", name, dtype)
    (tmp_path / "hf/tokenizer_config.json").write_text('{"chat_template": "\u00e9"}', encoding="utf-8")
    convert.main(["from_hf", str(tmp_path / "hf"), "--out", str(tmp_path / "new/base.pt")])
    convert.main(["to_hf", str(tmp_path / "new/base.pt"), "--out", str(tmp_path / "back"), "--max_shard_size", "20KB"])
    files = sorted(p.name for p in (tmp_path / "hf").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "back").iterdir()) and "config.json" in files
    for file in files:
        a, b = ((tmp_path / folder / file).read_bytes() for folder in ("hf", "back"))
        if file.endswith("index.json"):
            assert json.loads(a)["weight_map"] == json.loads(b)["weight_map"]
        elif file == "config.json":
            assert json.loads(a) == json.loads(b)
        else:
            assert a == b, file


@pytest.mark.parametrize("qk_norm, tie", [(True, True), (False, False)])
def test_our_own_model_in_transformers(run, tmp_path, qk_norm, tie):
    """One that never came from there, its averages, in another dtype; the tokenizer goes along."""
    rope = "{'rope_type': 'llama3', 'factor': 4.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, " \
           "'original_max_position_embeddings': 8}"
    folder = run("ours", residual="add", ema_decay=0.5, head_dim=6, rope_theta=50.0, rope_scaling=rope, qk_norm=qk_norm,
                 tie_embeddings=tie)
    to_hf(folder, tmp_path / "hf", weights="ema")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").double()
    ours, idx = GPT.from_checkpoint(folder, "ema").double(), tokens(2, 16, vocab=257)
    with torch.no_grad():
        found = norms_replaced(theirs, WideRMSNorm)(idx).logits
    assert (found - ours(idx)[0]).abs().max() < 1e-10
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "a \u00e9 <|endoftext|>x"
    assert tokenizer(text)["input_ids"] == [*"a \u00e9 ".encode(), 256, ord("x")] and tokenizer.eos_token_id == 256
    assert tokenizer.decode([*"\u00e9\n".encode()]) == "\u00e9\n"
    to_hf(folder, tmp_path / "half", dtype="bfloat16")
    halves = load_file(tmp_path / "half/model.safetensors")
    model = load_checkpoint(folder)["model"]
    assert torch.equal(halves["model.layers.1.mlp.up_proj.weight"], model["sublayers.3.up_proj.weight"].bfloat16())
    assert ("lm_head.weight" in halves) != tie and not torch.equal(model["embed.weight"], load_checkpoint(folder)["ema"]["embed.weight"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_byte_tokenizer_in_the_other_library():
    theirs, ours = HFTokenizer.from_str(byte_tokenizer_json().decode()), load_tokenizer("byte")
    text = "".join(map(chr, range(0x250))) + "\U0001f600 \u65e5\u672c\r\n\t  x"
    assert theirs.encode(text).ids == ours.encode(text).tolist() and theirs.decode(theirs.encode(text).ids) == text
    assert theirs.token_to_id("<|endoftext|>") == ours.eot and theirs.get_vocab_size() == ours.n_vocab


# ---- a pathway for a trained model


@pytest.mark.parametrize("entries", ["changes", "recursive"])
@pytest.mark.parametrize("name", ["qwen3 tied", "llama"])
def test_starts_as_the_model_it_was(tmp_path, name, entries):
    saved(tmp_path / "hf", name)
    from_hf(str(tmp_path / "hf"), tmp_path / "plain.pt")
    convert.main(["from_hf", str(tmp_path / "hf"), f"--out={tmp_path / 'delta.pt'}", "--residual", "delta", "--route_heads", "8",
                  "--sites_per_block=2", "--delta_entries", entries, "--seq_len", "40"])
    plain, delta = (GPT.from_checkpoint(tmp_path / f"{kind}.pt") for kind in ("plain", "delta"))
    assert (delta.config.route_heads, delta.config.sites_per_block, delta.config.delta_gate, delta.config.seq_len) == (8, 2, True, 40)
    idx, targets = tokens(4, 40, vocab=257), tokens(4, 40, vocab=257, seed=1)
    assert torch.equal(plain(idx)[0], delta(idx)[0])
    assert torch.equal(plain(idx, targets)[1], delta(idx, targets)[1])
    body, routed = gradients(plain, plain(idx, targets)[1]), gradients(delta, delta(idx, targets)[1])
    # here the order of additions differs: the two terms of a norm's backward meet before, or after, that of the residual
    assert_close({name: routed[name] for name in body}, body, 1e-6)


def test_training_opens_the_gates(tmp_path):
    """
    At the first step the gates alone can learn, at the second queries and null sources too; the gradient of a gain is in
    proportion to its query, so gains follow at the third.
    """
    saved(tmp_path / "hf", "llama")
    from_hf(str(tmp_path / "hf"), tmp_path / "base.pt", residual="delta", route_heads=8, sites_per_block=2)
    model, idx = GPT.from_checkpoint(tmp_path / "base.pt"), tokens(4, 64, vocab=257)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    learning = []
    for _ in range(3):
        model(idx, idx)[1].backward()
        grad = {name: p.grad[1:].flatten(1).abs().amax(1) for name, p in model.pathway.named_parameters()}
        assert all(g.min() == 0 or g.min() > 0 for g in grad.values())
        learning.append({name for name, g in grad.items() if (g > 0).all()})
        assert learning[-1] == {name for name, g in grad.items() if (g > 0).any()}             # all sites, or none
        optimizer.step()
        optimizer.zero_grad()
    assert learning == [{"gate"}, {"gate", "query", "null"}, {"gate", "query", "null", "gain"}]


@pytest.fixture
def base(tmp_path, corpus):
    """Checkpoints of one small model: plain.pt, and delta.pt made of it."""
    saved(tmp_path / "hf", "qwen3 tied")
    from_hf(str(tmp_path / "hf"), tmp_path / "plain.pt", seq_len=16)
    from_hf(str(tmp_path / "hf"), tmp_path / "delta.pt", residual="delta", route_heads=4, sites_per_block=2, seq_len=16)
    config = {"data_dir": str(corpus), "max_steps": 6, "batch_tokens": 192, "micro_batch_size": 2, "learning_rate": 3e-3, "warmup_steps": 2,
              "eval_interval": 3, "eval_tokens": 512, "save_interval": 3, "log_interval": 1, "device": "cpu", "schedule": "1-sqrt",
              "ema_decay": 0.5, "z_loss": 1e-3, "decay": "matrices"}
    (tmp_path / "mid.py").write_text("\n".join(f"{k} = {v!r}" for k, v in config.items()))
    return tmp_path


def mid(base, name, kind="delta", **changes):
    train.main([str(base / "mid.py"), f"--init_from={base / kind}.pt", f"--out_dir={base / name}", *(f"--{k}={v}" for k, v in changes.items())])
    return base / name


def test_a_run_starts_from_a_checkpoint(base, capsys):
    """Its body is the base's, what the config does not state comes from the checkpoint, and the averages start there too."""
    plain, delta = mid(base, "a", "plain"), mid(base, "b")
    assert losses(plain)[1] == losses(delta)[1] and all(losses(plain)[step] != losses(delta)[step] for step in (2, 6))
    state = load_checkpoint(delta, moments=True)
    assert (state["config"]["d_model"], state["config"]["head_dim"], state["config"]["route_heads"], state["config"]["rope_theta"]) == (32, 12, 4, 1e6)
    assert state["origin"]["config"]["model_type"] == "qwen3" and state["exp_avg"]["pathway.gate"].abs().min() == 0 < state["exp_avg"]["pathway.gate"].abs().max()
    start = load_checkpoint(base / "delta.pt")["model"]
    for name in ("sublayers.2.q_proj.weight", "norm.weight"):
        assert 0 < (state["model"][name] - start[name]).abs().max() < 0.02 and 0 < (state["ema"][name] - start[name]).abs().max() < 0.02
    first = log_of(mid(base, "c", max_steps=0))[0]
    model = GPT.from_checkpoint(base / "plain.pt")
    eval_file.main(["loss", str(base / "plain.pt"), "--data_dir", state["config"]["data_dir"], "--tokens", "512", "--json", str(base / "l.json")])
    assert first["val_loss"] == first["val_loss_ema"] == pytest.approx(json.loads((base / "l.json").read_text())[0]["loss"], abs=1e-6)
    assert model.config.seq_len == 16
    to_hf(plain, base / "out", weights="ema")
    config = json.loads((base / "out/config.json").read_text())
    original = json.loads((base / "hf/config.json").read_text())
    assert config == original | {"max_position_embeddings": 16} and config["dtype"] == "float32"


def test_trained_gates_stay(base):
    """Through loading, a new run and a resumed one."""
    state = load_checkpoint(base / "delta.pt")
    state["model"]["pathway.gate"] = torch.linspace(0.1, 0.9, 6).unsqueeze(1)
    torch.save(state, base / "opened.pt")
    for folder in (base / "opened.pt", mid(base, "a", "opened", max_steps=0), mid(base, "b", "opened", learning_rate=1e-9, max_steps=3)):
        if folder.name != "a":
            gate = GPT.from_checkpoint(folder).pathway.gate
            assert torch.allclose(gate, state["model"]["pathway.gate"], atol=1e-6), folder
    mid(base, "b", "opened", learning_rate=1e-9)
    assert load_checkpoint(base / "b")["step"] == 6
    assert torch.allclose(GPT.from_checkpoint(base / "b").pathway.gate, state["model"]["pathway.gate"], atol=1e-6)


def test_resuming_needs_the_start_no_more(base):
    whole = mid(base, "whole")
    part = mid(base, "part", max_steps=3, schedule="1-sqrt")
    os.remove(base / "delta.pt")
    mid(base, "part")
    assert load_checkpoint(part)["step"] == 6 and "origin" in load_checkpoint(part)
    assert load_checkpoint(whole)["model"].keys() == load_checkpoint(part)["model"].keys()


def test_sharded_processes_start_alike(base):
    """FSDP with activation checkpointing, which never builds the whole model, against one process."""
    for kind in ("plain", "delta"):
        one = mid(base, f"one_{kind}", kind, checkpoint="sublayer")
        code, output = torchrun("train.py", base / "mid.py", f"--init_from={base / kind}.pt", f"--out_dir={base / 'two'}_{kind}",
                                "--parallel=fsdp", "--checkpoint=sublayer", n=2)
        assert code == 0, output
        two = base / f"two_{kind}"
        for a, b in zip(log_of(one), log_of(two), strict=True):
            assert all(a[key] == pytest.approx(b[key], abs=1e-6) for key in a if "loss" in key or key == "grad_norm"), (a, b)
        a, b = load_checkpoint(one), load_checkpoint(two)
        assert all(torch.allclose(b["model"][name], value, atol=2e-5) for name, value in a["model"].items())
    code, output = torchrun("train.py", base / "mid.py", f"--init_from={base / 'two_delta'}", f"--out_dir={base / 'three'}", n=1)
    assert code == 0 and f"weights of {base / 'two_delta'}" in output, output           # shards are a start, too


def test_learning_rates_and_decay_of_groups(base):
    model = GPT.from_checkpoint(base / "delta.pt")
    names = {id(p): name for name, p in model.named_parameters()}

    def groups(**settings):
        return {g["name"]: (g["lr_share"], g.get("weight_decay"), sorted(names[id(p)] for p in g["params"]))
                for g in train.optimizer_groups(model, train.TrainConfig(**settings))}
    found = groups(learning_rate=1e-3, pathway_learning_rate=1e-2, decay="matrices")
    matrices = sorted(name for name in names.values() if name.endswith("proj.weight"))
    assert found["matrices"] == (1.0, None, matrices) and found["pathway"][:2] == (10.0, 0.0)
    assert found["body"][:2] == (1.0, 0.0) and "embed.weight" in found["body"][2]
    assert sorted(sum((g[2] for g in found.values()), [])) == sorted(names.values())
    assert {name: g[:2] for name, g in groups(learning_rate=1e-3).items()} == {"body": (1.0, None), "pathway": (1.0, None)}
    model = GPT(ModelConfig(vocab_size=50, n_layer=1, d_model=32, d_ff=8, residual="add", tie_embeddings=False))
    names = {id(p): name for name, p in model.named_parameters()}
    assert "lm_head.weight" in groups(decay="matrices")["matrices"][2]
    # nothing but decay and the pathway's own rate moves weights whose gradient is zero
    start = load_checkpoint(base / "delta.pt")["model"]
    still = load_checkpoint(mid(base, "still", weight_decay=0.5, learning_rate=1e-7, pathway_learning_rate=0.1, max_steps=1))["model"]
    moved = {name: (still[name] - start[name]).abs().max().item() for name in start}
    assert moved["pathway.gate"] > 0.01 and all(value < 1e-6 for name, value in moved.items() if name != "pathway.gate")


@pytest.mark.parametrize("argument, message", [
    ("--residual=add", r"another architecture: residual \(delta -> add\), route_heads \(4 -> 1\); convert.py makes a checkpoint of another pathway"),
    ("--d_ff=64", r"another architecture: d_ff \(48 -> 64\)"),
    ("--init_from=nowhere.pt", "no checkpoint at nowhere.pt"),
    ("--resume=DELTA", "holds weights only, which a run cannot go on from: start a new one with --init_from="),
    ("--pathway_learning_rate=0", "pathway_learning_rate must be positive, not 0"),
    ("--decay=some", "unknown decay='some'")])
def test_impossible_starts(base, argument, message):
    with pytest.raises(ConfigError, match=message):
        train.main([str(base / "mid.py"), f"--init_from={base / 'delta.pt'}", f"--out_dir={base / 'x'}",
                    argument.replace("DELTA", str(base / "delta.pt"))])
    assert not (base / "x").exists()


def test_starts_of_other_tokenizers_and_tensors(base):
    state = read(base / "delta.pt")
    state["tokenizer"] = load_tokenizer("byte").meta() | {"sha256": "0" * 64, "name": "other", "file": None}
    torch.save(state, base / "other.pt")
    with pytest.raises(ConfigError, match="has the tokenizer 'other', .* was made with another, 'byte'"):
        mid(base, "x", "other")
    for change, message in (({"pathway.gate": torch.zeros(())}, r"has pathway.gate of model as \(\), not \(6, 1\)"),
                            ({"pathway.gate": None}, "lacks pathway.gate of model"),
                            ({"pathway.alpha": torch.zeros(1)}, "has pathway.alpha of model, which this model has not")):
        state = read(base / "delta.pt")
        state["model"] = {name: t for name, t in (state["model"] | change).items() if t is not None}
        torch.save(state, base / "odd.pt")
        with pytest.raises(ConfigError, match=message):
            mid(base, "y", "odd")


# ---- what cannot be converted


def edit(path, **changes):
    found = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (found | changes).items() if value is not ...}))


def retensor(folder, change):
    """Change the tensors of the one file of a model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("change, message", [
    (dict(model_type="gemma"), "model_type='gemma' cannot be converted; known: qwen3, llama"),
    (dict(model_type=...), "model_type=None cannot be converted"),
    (dict(attention_bias=True), "attention_bias=True cannot be converted, only False"),
    (dict(mlp_bias=True), "mlp_bias=True cannot be converted"),
    (dict(hidden_act="gelu"), "hidden_act='gelu' cannot be converted, only 'silu'"),
    (dict(use_sliding_window=True), "use_sliding_window=True cannot be converted"),
    (dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types=.* cannot be converted"),
    (dict(quantization_config={"bits": 4}), "quantization_config=.* cannot be converted, only None"),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}), "rotary embeddings of type 'yarn'"),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}), "'partial_rotary_factor': 0.5"),
    (dict(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "rope_scaling lacks factor"),
    (dict(hidden_size=...), "config.json lacks hidden_size"),
    (dict(intermediate_size=40), r"gate_proj.weight has the shape \(48, 32\), config.json makes it \(40, 32\)"),
    (dict(num_hidden_layers=4), r"lacks the tensor model.layers.3.self_attn.q_proj.weight \(and 8 more\)"),
    (dict(num_hidden_layers=2), r"has the tensor model.layers.2.input_layernorm.weight, for which this model has no place \(and 8 more\)"),
    (dict(tie_word_embeddings=True), "config.json says that lm_head is the embedding, but lm_head.weight differs from it"),
    (dict(vocab_size="many"), "vocab_size must be a whole number, at least 1, not 'many'")])
def test_other_architectures(tmp_path, change, message):
    saved(tmp_path / "hf", "llama", max_shard_size="1GB")
    edit(tmp_path / "hf/config.json", **change)
    with pytest.raises(ConfigError, match=message) as e:
        from_hf(str(tmp_path / "hf"), tmp_path / "out/base.pt")
    assert "\n" not in str(e.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("change, message", [
    (lambda t: t.update({"model.norm.weight": torch.tensor(1.0)}), r"model.norm.weight has the shape \(\), config.json makes it \(32,\)"),
    (lambda t: t.pop("model.norm.weight"), "lacks the tensor model.norm.weight$"),
    (lambda t: t.update({"extra": torch.ones(3)}), "has the tensor extra, for which this model has no place$"),
    (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "model.norm.weight is torch.int8; known: float32")])
def test_odd_tensors(tmp_path, change, message):
    saved(tmp_path / "hf", "qwen3", max_shard_size="1GB")
    retensor(tmp_path / "hf", change)
    with pytest.raises(ConfigError, match=message):
        from_hf(str(tmp_path / "hf"), tmp_path / "base.pt")


def test_what_follows_from_the_config_is_passed_over(tmp_path):
    """Tables of older files, and an lm_head that repeats the embedding."""
    theirs = saved(tmp_path / "hf", "llama tied", max_shard_size="1GB")
    retensor(tmp_path / "hf", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                                                  "lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": None}))
    from_hf(str(tmp_path / "hf"), tmp_path / "base.pt")
    idx = tokens(1, 20, vocab=257)
    with torch.no_grad():
        assert rel_rms(GPT.from_checkpoint(tmp_path / "base.pt")(idx)[0], theirs(idx).logits) < 1e-5


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


DAMAGE = {
    "cut": (lambda f: os.truncate(shards(f)[1], shards(f)[1].stat().st_size - 10), "is not a safetensors file, or is cut short"),
    "empty": (lambda f: shards(f)[1].write_bytes(b""), "is not a safetensors file, or is cut short"),
    "gone": (lambda f: shards(f)[1].unlink(), "names the file model-00002-of-.*, which is not in"),
    "twice": (lambda f: shutil.copy(shards(f)[0], shards(f)[1]), "which model.safetensors.index.json says is in model-00001"),
    "exchanged": (lambda f: shards(f)[1].rename(shards(f)[0]), "which model.safetensors.index.json says is in|which is not in"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "has neither model.safetensors nor model.safetensors.index.json"),
    "broken index": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "is not JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json in"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json: say which tokenizer with --tokenizer"),
    "odd tokenizer": (lambda f: (f / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}'), "--tokenizer NAME_OR_FILE takes another one"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders(tmp_path, damage):
    saved(tmp_path / "hf", "llama")
    DAMAGE[damage][0](tmp_path / "hf")
    with pytest.raises(ConfigError, match=DAMAGE[damage][1]) as e:
        from_hf(str(tmp_path / "hf"), tmp_path / "base.pt")
    assert "\n" not in str(e.value) and not list(tmp_path.glob("base*"))
    if "tokenizer" in damage:
        from_hf(str(tmp_path / "hf"), tmp_path / "base.pt", tokenizer="byte")


def test_what_the_command_line_refuses(base, run, capsys):
    def refused(*argv):
        with pytest.raises(ConfigError) as e:
            convert.main([*map(str, argv)])
        assert "\n" not in str(e.value)
        return str(e.value)
    result = subprocess.run([sys.executable, ROOT / "convert.py", "from_hf", base / "no", "--out", base / "x.pt"], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and result.stderr.startswith("convert.py: "), result.stderr
    assert "plain.pt exists: choose another --out" in refused("from_hf", base / "hf", "--out", base / "plain.pt")
    assert "a checkpoint is a file NAME.pt" in refused("from_hf", base / "hf", "--out", base / "x")
    assert "residual='mhar' would not start as the model it is made from; known: add, delta" in refused(
        "from_hf", base / "hf", "--out", base / "x.pt", "--residual", "mhar")
    assert "residual='delt' would not start as the model it is made from (did you mean delta?)" in refused(
        "from_hf", base / "hf", "--out", base / "x.pt", "--residual", "delt")
    assert "--route_heads says how depth is read, which residual='add' does not do" in refused(
        "from_hf", base / "hf", "--out", base / "x.pt", "--route_heads", "2")
    assert "is no folder here and cannot be fetched from the hub" in refused("from_hf", "nobody/nothing@main", "--out", base / "x.pt")
    assert "transformers has no class for residual='delta'" in refused("to_hf", base / "delta.pt", "--out", base / "x")
    assert "hf exists: choose another --out" in refused("to_hf", base / "plain.pt", "--out", base / "hf")
    assert "has no 'ema' weights: train with --ema_decay" in refused("to_hf", base / "plain.pt", "--out", base / "x", "--weights", "ema")
    sparse = run("sparse", residual="add", moe_n_expert=2, moe_d_ff=8, max_steps=1)
    assert "transformers has no class for a mixture of experts" in refused("to_hf", sparse, "--out", base / "x")
    assert not list(base.glob("x*"))
    with pytest.raises(ConfigError, match="no data_dir in .*plain.pt, which was not trained here: say which with --data_dir"):
        eval_file.main(["loss", str(base / "plain.pt")])


def test_a_hub_that_answers(tmp_path, monkeypatch):
    """The hub cannot be reached in tests: what is asked of its library, and what is made of the answer."""
    import huggingface_hub
    theirs, asked = tmp_path / "snapshots" / "abc123", {}
    saved(theirs, "qwen3")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.update(k, name=a) or str(theirs))
    from_hf("org/name@phoenix", tmp_path / "base.pt")
    assert asked["name"] == ("org/name",) and asked["revision"] == "phoenix" and "*.safetensors" in asked["allow_patterns"]
    assert not any(p.endswith((".bin", ".py")) for p in asked["allow_patterns"])
    origin = load_checkpoint(tmp_path / "base.pt")["origin"]
    assert (origin["name"], origin["revision"]) == ("org/name@phoenix", "abc123")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_one_copy(tmp_path):
    """Peak resident memory of either direction, above that of the program itself, for 200 MB of weights."""
    saved(tmp_path / "hf", "llama", torch.bfloat16, hidden_size=768, intermediate_size=3072, num_hidden_layers=10, vocab_size=20_000,
          max_shard_size="60MB")
    size = sum(p.stat().st_size for p in (tmp_path / "hf").glob("*.safetensors"))
    # not getrusage: its peak is at first that of the process that started this one
    script = "import re, sys, convert, safetensors, huggingface_hub.serialization\n" \
             "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read()).group(1))\n" \
             "before = peak()\nconvert.main(sys.argv[1:])\nprint('peak', peak() - before)"
    for argv in (["from_hf", tmp_path / "hf", "--out", tmp_path / "base.pt", "--residual", "delta"],
                 ["from_hf", tmp_path / "hf", "--out", tmp_path / "plain.pt"],
                 ["to_hf", tmp_path / "plain.pt", "--out", tmp_path / "back"]):
        output = subprocess.run([sys.executable, "-c", script, *map(str, argv)], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        assert size > 180e6 and 0.5 * size < int(re.search(r"peak (\d+)", output).group(1)) < 1.3 * size, (argv[0], output)


# ---- the paper's 8B


def test_the_8b_recipes_fit_eight_gpus(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "8")
    for name, routing in (("midtrain_marin_8b_plain", "0"), ("midtrain_marin_8b_mhar", "786,496")):
        train.main([name, "--dry_run"])
        printed = capsys.readouterr().out
        total = int(re.search(r"([\d,]+) parameters", printed).group(1).replace(",", ""))
        assert total == 8_030_261_248 + int(routing.replace(",", "")) and f"of them {routing} routing" in printed
        assert 30 < float(re.search(r"([\d.]+) GiB$", printed.strip()).group(1)) < 74.5             # 80 GB
        assert "is not there: the model is as the config says" in printed
