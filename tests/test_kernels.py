"""
The Triton rung. Without a GPU the kernels are interpreted (TRITON_INTERPRET=1, set by conftest.py), and compiled for GPUs
ahead of time to read what the compiler made of them.
"""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
import bench
import route_kernels
from helpers import assert_close, gradients, random_model, rel_rms, tiny_config, tokens
from errors import ConfigError
from eval import choose_kernels
from model import GPT
from route_kernels import RUNGS, TritonHistory, launched
from train import load_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_history(R, C, P, streams, seed=0):
    """{name: float64 tensor}: what is written, queries, gains, how far a mix is handed on, and cotangents."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {"y": random(R, streams, 1, P, C), "query": random(R, streams, C) * 2 / C ** 0.5, "gain": 1 + 0.3 * random(R, C),
            "hand_on": random(R, C) / 2, "dout": random(R, streams, 1, P, C)}


def run(rung, t, H, keys=(0,), values=(0,), step=1, lay_out=lambda y: y, dtype=torch.float64):
    """
    All reads of a history -> {"mix": mixes of all sites, and every gradient}. As in a model each source depends on the mix
    before it; but only its gradient does, so that errors of one read are not handed on to the values of the next.
    """
    t = {name: x.to(DEVICE, dtype).requires_grad_(name in ("y", "query", "gain")) for name, x in t.items()}
    history = RUNGS[rung].history(RUNGS[rung], t["query"], t["gain"], H, 1e-6, keys, values, step)
    history.append(tuple(lay_out(y) for y in t["y"][0]))
    open_block, mixes, loss = None, [], 0
    for site, dout in enumerate(t["dout"]):
        mix = history.read(site, open_block)
        mixes += mix
        loss = loss + sum((m * d).sum() for m, d in zip(mix, dout))
        if site + 1 == len(t["y"]):
            break
        new = [y + t["hand_on"][site] * (m - m.detach()) for y, m in zip(t["y"][site + 1], mix)]
        open_block = tuple(lay_out(y if open_block is None else y + open_block[j]) for j, y in enumerate(new))
        if (site + 1) % step == 0:
            history.append(open_block)
            open_block = None
    loss.backward()
    return {"mix": torch.stack(mixes).detach()} | {name: x.grad for name, x in t.items() if x.requires_grad}


DAR = dict(keys=(1, 0), values=(0, 1))
SIZES = [  # R, C, H, P, the rest
    (2, 48, 1, 1, {}),                                 # one read of two sources
    (3, 48, 3, 5, {}),                                 # heads that are no power of two
    (10, 96, 8, 3, {}),                                # the last group has one read; K = 12 = 8 + 4
    (13, 512, 4, 1, {}),
    (12, 48, 16, 2, dict(step=2)),
    (14, 48, 2, 2, dict(step=5)),                      # blocks that end inside groups, an uneven last one
    (9, 768, 8, 1, dict(step=8)),
    (4, 1280, 8, 2, {}),                               # K = 160 = 128 + 32
    (6, 48, 2, 3, dict(step=2) | DAR),
    (9, 96, 1, 2, dict(step=3) | DAR),
    (5, 512, 4, 1, dict(step=2, keys=(0, 1), values=(0, 1))),
    (5, 48, 4, 1, dict(step=2, keys=(0, 1), values=(1, 0))),
    (5, 48, 4, 1, dict(step=2, keys=(0, 0), values=(1, 1)))]


@pytest.mark.parametrize("R, C, H, P, how", SIZES)
def test_kernels_equal_the_reference(R, C, H, P, how):
    """Mixes of all reads and every gradient, in float32 against float64."""
    t = random_history(R, C, P, len(how.get("keys", (0,))))
    before = launched.total()
    found, expected = run("triton", t, H, dtype=torch.float32, **how), run("reference", t, H, **how)
    assert launched.total() - before == (2 + len(how.get("keys", (0,)))) * (R - 1)             # the fast path ran
    assert_close(found, expected, 1e-6)


def test_many_sources():
    t = random_history(73, 48, 1, 1)
    assert_close(run("triton", t, 2, dtype=torch.float32), run("reference", t, 2), 1e-6)


LAYOUTS = {
    "transposed": lambda y: y.mT.contiguous().mT,
    "expanded": lambda y: y[:, :1].expand_as(y),
    "strided": lambda y: torch.stack((y, torch.full_like(y, torch.nan)), -1)[..., 0],
    "offset": lambda y: torch.cat((torch.full_like(y, torch.nan).flatten()[:3], y.flatten()))[3:].view_as(y)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", [{}, dict(step=2) | DAR])
def test_sources_of_any_layout(layout, how):
    how = how | dict(lay_out=LAYOUTS[layout])
    t = random_history(5, 48, 3, len(how.get("keys", (0,))))
    assert_close(run("triton", t, 4, dtype=torch.float32, **how), run("reference", t, 4, **how), 1e-6)


def test_two_runs_give_the_same_bits():
    t = random_history(4, 48, 17, 1)                       # more tokens than a program takes
    first, second = (run("triton", t, 2, dtype=torch.float32) for _ in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ----------------------------------------------------------------------------------------------------------------------
# in the model

VARIANTS = [dict(residual="attnres"), dict(residual="mhar"), dict(residual="mhar", sites_per_block=3), dict(residual="dar"),
            dict(residual="dar", sites_per_block=3, route_heads=2), dict(residual="dar_selfkv"), dict(residual="dar_fixed"),
            dict(residual="delta", route_heads=2), dict(residual="delta", n_layer=5)]


def on_device(model):
    model.to(DEVICE, torch.float32)
    return model


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_whole_model(config):
    """Logits and every gradient of the model, float32 against the reference in float64."""
    idx = tokens(1, 3).to(DEVICE)
    reference = random_model(kernels="reference", **config).to(DEVICE)
    model = on_device(random_model(kernels="triton", **config))
    # seeded: other draws make gradients of q_norm and k_norm that even the reference gets only to 2e-5 in float32
    dout = torch.randn(1, 3, 61, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found, expected = (m(idx)[0] for m in (model, reference))
    assert rel_rms(found, expected) < 2e-6
    assert_close(gradients(model, found, dout.float()), gradients(reference, expected, dout), 1e-5)


@pytest.mark.parametrize("config", VARIANTS[1::2], ids=str)
def test_bf16_is_no_worse_than_the_reference(config):
    """Error of logits and gradients in bfloat16 against the truth, next to the reference's own."""
    idx, names = tokens(1, 3).to(DEVICE), ("query", "gain")
    truth = random_model(kernels="reference", **config).to(DEVICE)
    dout = torch.randn(1, 3, 61, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = gradients(truth, truth(idx)[0], dout)
    errors = {}
    for kernels in ("reference", "triton"):
        model = on_device(random_model(kernels=kernels, **config))
        model.compute_dtype = torch.bfloat16
        found = gradients(model, model(idx)[0], dout.bfloat16())
        errors[kernels] = sum(rel_rms(found[name], expected[name]) ** 2 for name in expected) ** 0.5
    # the interpreter cuts bfloat16 off instead of rounding it: twice the error of each cast
    assert errors["triton"] < errors["reference"] * (1.1 if DEVICE == "cuda" else 2.2)


def test_composes_with_checkpointing_accumulation_and_no_grad():
    idx = tokens(2, 2).to(DEVICE)
    model = on_device(random_model(kernels="triton", residual="mhar"))
    expected = gradients(model, model(idx, idx)[1])
    model.checkpoint = True
    assert_close(gradients(model, model(idx, idx)[1]), expected, 1e-5)
    for f in model.sublayers:
        f.compile(backend="eager")
    assert_close(gradients(model, model(idx, idx)[1]), expected, 1e-5)
    for part in idx[:1], idx[1:]:                          # two micro-batches
        (model(part, part)[1] / 2).backward()
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected, 1e-5)
    with torch.no_grad():
        assert rel_rms(model(idx, idx)[1], model(idx, idx)[1]) == 0
    lean = GPT(model.config, kernels="lean").to(DEVICE)
    lean.load_state_dict(model.state_dict())
    assert torch.equal(model.eval().generate(idx, 3, temperature=0), lean.eval().generate(idx, 3, temperature=0))


def test_nothing_outlives_a_step(monkeypatch):
    """Buffers go with the backward, even if the loss is kept; without one, with the graph, and no collector is needed."""
    made, build = [], TritonHistory.__init__

    def remember(self, *args):
        build(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(TritonHistory, "__init__", remember)
    idx = tokens(1, 2).to(DEVICE)
    model = on_device(random_model(kernels="triton", residual="dar"))
    gc.disable()
    try:
        loss = model(idx, idx)[1]
        loss.backward()
        assert made[0]().bank is made[0]().dbank is made[0]().lse is None
        del loss
        model(idx, idx)                                    # a graph that is never walked
        assert [ref() for ref in made] == [None, None]
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------------------------
# traffic, compiled code, large offsets


@pytest.mark.skipif(DEVICE == "cuda", reason="counted by the interpreter")
@pytest.mark.parametrize("config, tokens", [
    (dict(residual="mhar", n_layer=12, d_model=512, n_head=8, n_kv_head=4), 1), (dict(residual="attnres"), 17),
    (dict(residual="mhar", sites_per_block=3, n_layer=5), 2), (dict(residual="dar", n_layer=5, sites_per_block=3), 2)], ids=str)
def test_traffic(config, tokens):
    """Every byte that the kernels load and store is foreseen."""
    config = tiny_config(**config)
    reads = bench.Reads(config, tokens, "cpu", torch.bfloat16)
    expected = bench.traffic(reads.history(TritonHistory, RUNGS["triton"]), tokens, 2)
    found = bench.count_bytes(config, tokens, torch.bfloat16)
    programs, in_program = -(-tokens // 16), 16
    found["dqg"] *= tokens / (programs * in_program)
    assert expected.pop("copies") > 0 and found.pop("qg") > 0
    assert {name: n / tokens for name, n in found.items()} == pytest.approx(dict(expected))


@pytest.mark.parametrize("name, best", [("mhar_100m", 0.90), ("mhar_350m", 4.73), ("mhar_1b", 10.5)])
def test_traffic_at_the_papers_sizes(name, best):
    """MB a token, forward and backward, against the best scheme known before."""
    _, config = load_config([f"configs/{name}.py"])
    reads = bench.Reads(config, 1, "meta", torch.bfloat16)
    moved = sum(bench.traffic(reads.history(TritonHistory, RUNGS["triton"]), 8 * config.seq_len, 2).values()) / 1e6
    assert bench.best_known(config.n_layer) * config.d_model / 1e6 == pytest.approx(best, rel=0.005)
    assert moved < 0.85 * best


def test_at_most_a_tenth_of_the_lanes_is_padding():
    for C, H in ((512, 4), (1024, 8), (1280, 8), (1280, 16), (768, 8), (4096, 8)):
        _, _, tile = route_kernels.tile_of(C, H, 1)
        assert tile["HP"] * (tile["KA"] + tile["KB"] * (tile["KA"] < tile["K"])) <= 1.1 * C


def test_compiled_code():
    """For three generations of GPUs: nothing spilled, and most bytes in 16-byte accesses."""
    cases = [f"90:{C}:{H}:1" for C in (512, 1024, 1280) for H in (1, 4, 8, 16)]
    cases += ["90:512:1:2", "90:1024:1:2", "90:1280:1:2"] + [f"{arch}:{size}:1" for arch in (80, 100)
                                                            for size in ("512:4", "1024:8", "1280:8")]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    halves = [subprocess.Popen([sys.executable, str(Path(__file__).with_name("compiled.py")), *cases[i::2]], text=True, env=env,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in (0, 1)]
    rows = []
    for half in halves:
        output, errors = half.communicate(timeout=600)
        assert half.returncode == 0, errors
        rows += map(json.loads, output.splitlines())
    assert {row["case"] for row in rows} == set(cases)
    for row in rows:
        assert row["stack"] == row["local"] == row["spills"] == 0, row
        assert row["bytes_by_width"]["128"] > 0.5 * sum(row["bytes_by_width"].values()), row


@pytest.mark.skipif(DEVICE == "cuda", reason="addresses of the interpreter")
@pytest.mark.parametrize("kernel", ["_forward", "_backward"])
def test_offsets_beyond_32_bits(kernel, monkeypatch):
    """With P made out to be 2^28 tokens, source n of 48 channels lies n 2^28 48 elements into the bank, which has 2^35."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype
    history = (reads := bench.Reads(tiny_config(residual="mhar", d_model=48), 1, "cpu", torch.bfloat16)).history(
        TritonHistory, RUNGS["triton"])
    with torch.no_grad():
        reads.run(history, backward=False)
    touched = set()

    def load(self, pointers, mask, *_):
        touched.update(pointers.data[mask.data.astype(bool)].tolist())
        return TensorHandle(np.zeros(pointers.data.shape, _get_np_dtype(pointers.get_element_ty())), pointers.get_element_ty())

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", lambda self, at, _, mask, *rest: load(self, at, mask))
    one, bank, dbank = torch.zeros(1), history.bank, torch.zeros(1)
    monkeypatch.setattr(history, "launch", lambda kernel, tensors, _, *numbers, **constants: kernel[1,](
        *tensors, 2**28, 2, *numbers, **constants))
    if kernel == "_forward":
        history.launch_reads(route_kernels._forward, 4, 1, 0, (one, one, one), MERGE=False)
        expected = {bank.data_ptr() + 2 * n * 2**28 * 48 for n in range(5)}
    else:
        history.launch_reads(route_kernels._backward, 4, 1, 0, (one, one, one, dbank, one, one), ADD=True)
        expected = {dbank.data_ptr() + 4 * n * 2**28 * 48 for n in range(4)} | {bank.data_ptr() + 8 * 2**28 * 48}
    assert expected <= touched


# ----------------------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize("form", [dict(sites_per_block=2), dict(delta_gate=True), dict(delta_entries="recursive")], ids=str)
def test_forms_without_kernels_are_refused_or_get_lean(form, monkeypatch):
    """delta reads closed blocks, and a null source, in ways the kernels do not know."""
    config = tiny_config(residual="delta", **form)
    with pytest.raises(ConfigError, match="kernels=triton: this form of residual='delta' has no such kernels; use --kernels=lean"):
        GPT(config, kernels="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert choose_kernels("auto", "cuda", torch.bfloat16, config) == "lean"
    assert choose_kernels("auto", "cuda", torch.bfloat16, tiny_config(residual="delta")) == "triton"


def test_backward_out_of_order_or_twice_is_refused():
    idx = tokens(1, 2).to(DEVICE)
    model = on_device(random_model(kernels="triton", residual="mhar"))
    loss = model(idx, idx)[1]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="read 4 came when that of read -1 was due.*--kernels=lean"):
        loss.backward()
    (grad, *_) = torch.autograd.grad(model(idx, idx)[1], [model.pathway.query], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    state = model.pathway.start(model.embed(idx))
    with pytest.raises(RuntimeError, match="read 1 came when read 0 was due"):
        model.pathway.read(state, 1)
    h, carry = model.pathway.read(state, 0)
    state = model.pathway.write(state, h * 2, 0, carry)
    h, carry = model.pathway.read(state, 1)
    with pytest.raises(RuntimeError, match="backward of read 1 came when that of read 4 was due"):
        h.sum().backward()


def test_choose(monkeypatch):
    assert route_kernels.choose("auto", "cuda", torch.bfloat16) == "triton"
    assert route_kernels.choose("auto", "cuda", torch.float64) == "lean"
    assert route_kernels.choose("auto", "cpu", torch.float32) == route_kernels.choose("auto", "mps", torch.float32) == "lean"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="the kernels need a GPU of CUDA, not mps; use --kernels=lean"):
        route_kernels.choose("triton", "mps", torch.float32)
    with pytest.raises(ValueError, match="float16, not torch.float64"):
        route_kernels.choose("triton", "cuda", torch.float64)
    monkeypatch.setattr(route_kernels, "triton", None)
    assert route_kernels.choose("auto", "cuda", torch.bfloat16) == "lean"
    with pytest.raises(ValueError, match="triton is not installed"):
        route_kernels.choose("triton", "cuda", torch.bfloat16)


def test_works_without_triton():
    """As on macOS: the module imports, lean runs."""
    code = ("import sys; sys.modules['triton'] = None; import torch, model; m = model.GPT(model.ModelConfig(vocab_size=9, "
            "n_layer=1, n_head=1, n_kv_head=1, d_model=8, d_ff=8)); print(m(torch.zeros(1, 2, dtype=int))[0].shape)")
    result = subprocess.run([sys.executable, "-c", code], cwd=Path(route_kernels.__file__).parent, text=True,
                            capture_output=True, timeout=120)
    assert result.stdout == "torch.Size([1, 2, 9])\n", result.stderr
