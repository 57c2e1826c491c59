"""The depth read: each rung against the one before it, and the specification against two other implementations."""

import pytest
import torch
from attnres import attnres as fast_attnres
from fla.ops.attnres import naive_attnres

from helpers import assert_close, rel_rms, tiny_config, tokens
from bench import saved_bytes
from model import GPT, Add, ConfigError
from route_kernels import RUNGS, depth_read_lean, depth_read_reference, depth_weights, read_ahead_lean

EPS = 1e-6
TORCH = {name: RUNGS[name] for name in ("reference", "lean")}


def random_read(N, B, T, C, keys=False, seed=0, dtype=torch.float64):
    """{name: tensor} of one read: sources v0 .., keys k0 .. if `keys`, query, gain, and a cotangent `dout`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    x = {f"v{n}": random(B, T, C) * (0.3 + n % 3) for n in range(N)}
    if keys:
        x |= {f"k{n}": random(B, T, C) for n in range(N)}
    x |= {"query": random(C) * 2 / C ** 0.5, "gain": 1 + 0.3 * random(C), "dout": random(B, T, C)}
    return x


def pick(x, prefix):
    return [t for name, t in x.items() if name.startswith(prefix) and name[1:].isdigit()]


def run(read, x, heads, build=None, frozen=()):
    """{"out": read's output, and the gradient of every tensor of x but those named in `frozen`}"""
    dout = x["dout"]
    x = {name: t.detach().clone().requires_grad_(name not in frozen) for name, t in x.items() if name != "dout"}
    values, keys = build(x) if build else (pick(x, "v"), pick(x, "k") or None)
    out = read(values, x["query"], x["gain"], heads, EPS, keys)
    names = [name for name, t in x.items() if t.requires_grad]
    grads = torch.autograd.grad(out, [x[name] for name in names], dout, allow_unused=True)
    return {"out": out, **{name: torch.zeros_like(x[name]) if g is None else g for name, g in zip(names, grads)}}


# ----------------------------------------------------------------------------------------------------------------------
# lean against the reference

SIZES = [  # N, B, T, C, H, separate keys
    (1, 1, 1, 48, 1, False),       # one source: the identity, and nothing for query and gain to learn
    (1, 3, 17, 96, 3, True),       # the same with a key of its own, whose gradient is zero
    (2, 1, 17, 48, 3, False),      # the first read that chooses
    (2, 3, 17, 33, 3, True),       # odd width cut into three: K = 11
    (2, 3, 17, 100, 1, False),     # one head; C is a multiple of 4 and of no larger power of 2
    (33, 1, 17, 33, 1, True),      # just past 32 sources, odd width
    (33, 3, 1, 96, 8, False),      # one token; K = 12
    (33, 1, 17, 48, 8, True),      # narrow heads: K = 6
    (49, 1, 17, 96, 8, False),     # the readout of 24 layers
    (49, 3, 1, 100, 1, True),      # the same, one token and one head
    (49, 1, 1, 48, 3, True),       # the same, one row in all
    (2, 1, 17, 33, 33, False),     # one channel a head
]


@pytest.mark.parametrize("N, B, T, C, H, keys", SIZES)
def test_lean_is_reference(N, B, T, C, H, keys):
    x = random_read(N, B, T, C, keys)
    found, expected = run(depth_read_lean, x, H), run(depth_read_reference, x, H)
    assert len(found) == 1 + N * (1 + keys) + 2
    assert_close(found, expected, 1e-12)


def columns(t):
    """The same values in column-major memory."""
    return t.mT.contiguous().mT


LAYOUTS = {
    "one source several times": lambda x: ([x["v0"], x["v1"], x["v0"], x["v0"]], None),
    "keys are values of another order": lambda x: ([x["v0"], x["v1"], x["v2"]], [x["v2"], x["v0"], x["v0"]]),
    "keys are the values": lambda x: ([x["v0"], x["v1"], x["v2"]], [x["v0"], x["v1"], x["v2"]]),
    "expanded over batch, time or channels": lambda x: (
        [x["v0"][:1].expand(3, -1, -1), x["v1"][:, :1].expand(-1, 5, -1), x["v2"][..., :1].expand(-1, -1, 12)], None),
    "strided": lambda x: (
        [columns(x["v0"]), torch.cat((x["v1"], x["v2"]), 1)[:, ::2], torch.cat((x["v2"], x["v0"]), -1)[..., ::2]],
        [x["v1"], columns(x["v2"]), torch.cat((x["v0"], x["v1"]), -1)[..., ::2]]),
    "a tuple of slices of one tensor": lambda x: (torch.stack((x["v0"], x["v1"], x["v2"])).unbind(0), None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lean_is_reference_for_any_layout(layout):
    x = random_read(3, 3, 5, 12)
    found, expected = (run(read, x, 3, LAYOUTS[layout]) for read in (depth_read_lean, depth_read_reference))
    assert_close(found, expected, 1e-12)


def test_cotangent_may_be_expanded_or_strided():
    x = random_read(3, 3, 5, 12)
    for dout in (x["dout"][:1, :1, :1].expand(3, 5, 12), columns(x["dout"])):
        assert not dout.is_contiguous()
        found = run(depth_read_lean, x | {"dout": dout}, 3)
        assert_close(found, run(depth_read_reference, x | {"dout": dout}, 3), 1e-12)
        assert_close(found, run(depth_read_reference, x | {"dout": dout.contiguous()}, 3), 1e-12)


@pytest.mark.parametrize("keys, frozen", [
    (False, ["v0", "v2"]),                      # some sources
    (False, ["v0", "v1", "v2"]),                # all: only query and gain learn
    (False, ["query", "gain"]),                 # the router
    (True, ["v0", "v1", "v2"]),                 # values, not keys
    (True, ["k0", "k1", "k2", "gain"]),         # keys, not values
])
def test_frozen_inputs(keys, frozen):
    x = random_read(3, 2, 5, 12, keys)
    found, expected = run(depth_read_lean, x, 3, frozen=frozen), run(depth_read_reference, x, 3, frozen=frozen)
    assert not found.keys() & set(frozen)
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("read, tol", [
    (depth_read_lean, 2 ** -8),         # each result is rounded to bf16 once: relative error at most 2^-9 an element
    (depth_read_reference, 2 ** -7),    # autograd rounds the key's and the value's part of a gradient, and their sum
])
def test_bf16_sources_are_read_in_fp32(read, tol, keys):
    """fp32 query and gain, as master weights are: their gradients show that nothing was rounded on the way to them."""
    exact = {name: t.bfloat16().double() if name not in ("query", "gain") else t.float().double()
             for name, t in random_read(9, 2, 17, 96, keys).items()}
    expected = run(depth_read_reference, exact, 8)
    found = run(read, {name: t.float() if name in ("query", "gain") else t.bfloat16() for name, t in exact.items()}, 8)
    assert all(g.dtype == (torch.float32 if name in ("query", "gain") else torch.bfloat16) for name, g in found.items())
    assert_close({name: found.pop(name) for name in ("query", "gain")},
                 {name: expected.pop(name) for name in ("query", "gain")}, 1e-5)
    assert_close(found, expected, tol)


@pytest.mark.parametrize("read", [rung.read for rung in TORCH.values()], ids=TORCH)
def test_bf16_parameters_are_multiplied_in_fp32(read):
    """fp32 sources show it: only the gradients of query and gain are bf16, and rounded once."""
    exact = {name: t.bfloat16().double() if name in ("query", "gain") else t.float().double()
             for name, t in random_read(9, 2, 17, 96).items()}
    expected = run(depth_read_reference, exact, 8)
    found = run(read, {name: t.bfloat16() if name in ("query", "gain") else t.float() for name, t in exact.items()}, 8)
    assert_close({name: found.pop(name) for name in ("query", "gain")},
                 {name: expected.pop(name) for name in ("query", "gain")}, 2 ** -8)
    assert_close(found, expected, 1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# calculus, memory, selection


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("read", [rung.read for rung in TORCH.values()], ids=TORCH)
def test_gradcheck(read, keys):
    x = random_read(3, 1, 2, 6, keys)
    leaves = [t.requires_grad_() for name, t in x.items() if name != "dout"]

    def f(*leaves):
        x_ = dict(zip(x, leaves))
        return read(pick(x_, "v"), x_["query"], x_["gain"], 2, EPS, pick(x_, "k") or None)

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("read", [rung.read for rung in TORCH.values()], ids=TORCH)
def test_backward_twice_and_inputs_untouched(read):
    x = random_read(5, 2, 3, 12, keys=True)
    leaves = [t.requires_grad_() for name, t in x.items() if name != "dout"]
    before, versions = [t.detach().clone() for t in x.values()], [t._version for t in x.values()]
    out = read(pick(x, "v"), x["query"], x["gain"], 3, EPS, pick(x, "k"))
    first = torch.autograd.grad(out, leaves, x["dout"], retain_graph=True)
    second = torch.autograd.grad(out, leaves, x["dout"])
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(first, second))
    assert all(torch.equal(t, old) for t, old in zip(x.values(), before))
    assert [t._version for t in x.values()] == versions


def all_read_ahead(values, query, gain, heads, eps):
    """A read with no later source to merge."""
    ahead, = read_ahead_lean(values, query[None], gain[None], heads, eps)
    return depth_read_lean(values, query, gain, heads, eps, ahead=ahead)


@pytest.mark.parametrize("read", [*(rung.read for rung in TORCH.values()), all_read_ahead], ids=[*TORCH, "read ahead"])
def test_second_derivatives_are_right_or_refused(read):
    x = random_read(3, 1, 2, 6)
    leaves = [t.requires_grad_() for name, t in x.items() if name != "dout"]

    def second(read):
        out = read(pick(x, "v"), x["query"], x["gain"], 2, EPS)
        grads = torch.autograd.grad(out, leaves, x["dout"], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    try:
        found = second(read)
    except RuntimeError:
        return
    for a, b in zip(found, second(depth_read_reference)):
        assert rel_rms(a, b) < 1e-10


def test_lean_keeps_little_for_backward():
    """Lean reads add at most a third to what a plain model of 12 layers keeps; the reference far more."""
    idx = tokens(1, 64, vocab=512)
    model = GPT(tiny_config(n_layer=12, d_model=768, n_head=12, n_kv_head=4, d_ff=2048, vocab_size=512, seq_len=64,
                            residual="mhar"), kernels="lean")
    lean = saved_bytes(model, idx)
    model.pathway.rung = RUNGS["reference"]
    reference = saved_bytes(model, idx)
    model.pathway = Add(model.config)
    add = saved_bytes(model, idx)
    assert add < lean < 1.35 * add
    assert reference > 2 * add


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n_ahead, n_late, G, C, H, B, T, with_keys", [
    (1, 0, 1, 48, 1, 2, 3, False),       # one source, one read, nothing to merge
    (5, 3, 4, 48, 4, 2, 5, False),
    (9, 1, 3, 96, 8, 1, 17, False),      # a depth block: one open sum
    (3, 2, 2, 33, 3, 3, 1, False),       # odd width, one token
    (4, 2, 3, 48, 2, 2, 5, True),        # keys of their own
    (2, 0, 2, 100, 5, 1, 7, True),
    (33, 6, 8, 24, 3, 1, 4, False)])     # deep
def test_reading_ahead_and_merging_is_the_read(n_ahead, n_late, G, C, H, B, T, with_keys):
    """G reads whose first sources were read together equal G reads of all their sources: outputs and every gradient."""
    N = n_ahead + n_late
    values = [normal((B, T, C), i).requires_grad_() for i in range(N)]
    keys = [normal((B, T, C), 100 + i).requires_grad_() for i in range(N)] if with_keys else None
    query, gain = normal((G, C), 200).requires_grad_(), (1 + 0.3 * normal((G, C), 201)).requires_grad_()
    cotangents = [normal((B, T, C), 300 + g) for g in range(G)]
    ahead = read_ahead_lean(values[:n_ahead], query, gain, H, 1e-3, keys and keys[:n_ahead])
    found = [depth_read_lean(values, query[g], gain[g], H, 1e-3, keys, ahead[g]) for g in range(G)]
    expected = [depth_read_reference(values, query[g], gain[g], H, 1e-3, keys) for g in range(G)]
    assert all(rel_rms(a, b) < 1e-14 for a, b in zip(found, expected))
    inputs = [query, gain, *values, *(keys or [])]
    for a, b in zip(*(torch.autograd.grad(out, inputs, cotangents, retain_graph=True) for out in (found, expected))):
        assert rel_rms(a, b) < 1e-12
    # half the reads unused, as when a loss is taken in the middle of the model
    for a, b in zip(*(torch.autograd.grad(out[0], inputs, cotangents[0], allow_unused=True, materialize_grads=True)
                      for out in (found, expected))):
        assert rel_rms(a, b) < 1e-12


@pytest.mark.parametrize("config, expected", [
    (dict(residual="attnres"), [(2, 8), (10, 6)]),
    (dict(residual="mhar", sites_per_block=3), [(4, 6)]),             # closed blocks; one source is no history
    (dict(residual="dar", sites_per_block=4), [(3, 6), (3, 6)]),      # one pass a stream
])
def test_groups_are_read_ahead(config, expected, monkeypatch):
    """(sources, reads) of each pass in seven layers. Nothing but speed would show that they were not made."""
    passes, lean = [], RUNGS["lean"]

    def spy(values, queries, *args):
        passes.append((len(values), len(queries)))
        return lean.read_ahead(values, queries, *args)

    monkeypatch.setitem(RUNGS, "lean", lean._replace(read_ahead=spy))
    GPT(tiny_config(n_layer=7, **config), kernels="lean")(tokens(1, 3))
    assert passes == expected


def test_model_takes_the_rung_it_is_told(monkeypatch):
    calls = []
    for name, rung in TORCH.items():
        monkeypatch.setitem(RUNGS, name, rung._replace(
            read=lambda *args, name=name, read=rung.read, **ahead: (calls.append(name), read(*args, **ahead))[1]))
    for name in TORCH:
        calls.clear()
        model = GPT(tiny_config(residual="mhar"), kernels=name)
        model(tokens(1, 3))
        assert model.kernels == name and calls == [name] * 4       # four reads of more than one source in two layers
    with pytest.raises(ConfigError, match="'leen'.*did you mean lean.*known: reference, lean, triton"):
        GPT(tiny_config(), kernels="leen")


# ----------------------------------------------------------------------------------------------------------------------
# the reference against other implementations, and what is known without one


def fla(values, query, gain):
    """flash-linear-attention's specification: one head, learned gain, float32 inside whatever goes in."""
    return naive_attnres(query, values, gain, rms_eps=EPS)


def fast(values, query, gain):
    """fast-attnres: one head, float32, no gain (only query * gain enters a logit), eps 2^-23 unless given."""
    return fast_attnres([v.float() for v in values], (query * gain).float(), eps=EPS)


@pytest.mark.parametrize("oracle", [fla, fast])
@pytest.mark.parametrize("N, C, H", [(1, 48, 1), (5, 96, 1), (2, 33, 3), (33, 96, 8), (5, 100, 4)])
def test_reference_is_other_implementations(oracle, N, C, H):
    """
    Those have one head. Head h of ours is theirs with the query zeroed outside slice h, its output kept inside it; that
    holds because the key norm is over all channels. Both compute in float32, hence 1e-6.
    """
    def one_head_at_a_time(values, query, gain, heads, eps, keys):
        K = C // heads
        slices = []
        for h in range(heads):
            inside = torch.zeros(C, dtype=query.dtype).index_fill(0, torch.arange(h * K, h * K + K), 1)
            slices.append(oracle(values, query * inside, gain)[..., h * K:h * K + K])
        return torch.cat(slices, -1).double()

    x = random_read(N, 2, 7, C)
    assert_close(run(one_head_at_a_time, x, H), run(depth_read_reference, x, H), 1e-6)


@pytest.mark.parametrize("read", [rung.read for rung in TORCH.values()], ids=TORCH)
def test_zero_query_is_the_mean(read):
    x = random_read(7, 2, 3, 12)
    values = pick(x, "v")
    out = read(values, torch.zeros_like(x["query"]), x["gain"], 3, EPS)
    assert rel_rms(out, sum(values) / 7) < 1e-15
    separate = read(values, torch.zeros_like(x["query"]), x["gain"], 3, EPS, [v + 1 for v in values])
    assert torch.equal(separate, out)


@pytest.mark.parametrize("N, H", [(1, 1), (2, 3), (49, 4)])
def test_weights_are_a_distribution_over_depth(N, H):
    x = random_read(N, 2, 5, 12)
    w = depth_weights(pick(x, "v"), x["query"], x["gain"], H, EPS)
    assert w.shape == (N, 2, 5, H) and (w > 0).all() and (w.sum(0) - 1).abs().max() < 1e-14
    if N > 1 and H > 1:
        assert (w[..., 0] - w[..., 1]).abs().max() > 1e-3          # each head has its own


def test_key_norm_is_over_all_channels():
    """Growing the channels of head 1 lowers the keys of head 0 too: with one norm a slice it would not."""
    x = random_read(3, 1, 2, 8)
    grown = [v * torch.tensor([1.0] * 4 + [10.0 ** n] * 4) for n, v in enumerate(pick(x, "v"))]
    w, w_grown = (depth_weights(v, x["query"], x["gain"], 2, EPS) for v in (pick(x, "v"), grown))
    assert (w[..., 0] - w_grown[..., 0]).abs().max() > 1e-2
