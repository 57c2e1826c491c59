"""Every pathway: against a plain loop over its paper's equations, and what must hold of it whatever the numbers are."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import body
import literal
from bench import Memory, saved_bytes
from helpers import assert_close, gradients, random_model, rel_rms, tiny_config, tokens
from model import GPT, PATHWAYS, Attention, ConfigError, Context, ModelConfig, token_losses
from route_kernels import RUNGS

DAR_FAMILY = ["dar", "dar_selfkv", "dar_crossv", "dar_fixed"]
STREAMS = ["hc_static", "hc", "mhc"]                  # these do not attend over depth

# four layers are eight sites: blocks of 3 leave a last block of 2, blocks of 4 come out even
VARIANTS = {
    "add": dict(residual="add"),
    "attnres": dict(residual="attnres"),
    "attnres, 3 sites a block": dict(residual="attnres", sites_per_block=3),
    "attnres, 4 sites a block": dict(residual="attnres", sites_per_block=4),
    "mhar, 1 head": dict(residual="mhar", route_heads=1),
    "mhar, 2 heads": dict(residual="mhar", route_heads=2),
    "mhar, 4 heads": dict(residual="mhar", route_heads=4),
    "mhar, 1 head, 3 sites a block": dict(residual="mhar", route_heads=1, sites_per_block=3),
    "mhar, 2 heads, 4 sites a block": dict(residual="mhar", route_heads=2, sites_per_block=4),
    "mhar, 4 heads, 3 sites a block": dict(residual="mhar", route_heads=4, sites_per_block=3),
    "dar": dict(residual="dar"),
    "dar, 4 sites a block": dict(residual="dar", sites_per_block=4),
    "dar, 3 sites a block": dict(residual="dar", sites_per_block=3),
    "dar, 3 heads": dict(residual="dar", route_heads=3),
    "dar, 4 heads, 3 sites a block": dict(residual="dar", route_heads=4, sites_per_block=3),
    "dar_selfkv": dict(residual="dar_selfkv"),
    "dar_crossv, 3 sites a block": dict(residual="dar_crossv", sites_per_block=3),
    "dar_fixed, 2 heads": dict(residual="dar_fixed", route_heads=2),
    "delta": dict(residual="delta"),
    "delta, 3 heads, 3 sites a block": dict(residual="delta", route_heads=3, sites_per_block=3),
    "delta, gated": dict(residual="delta", delta_gate=True),
    "delta, gated, 2 heads, 3 sites a block": dict(residual="delta", delta_gate=True, route_heads=2, sites_per_block=3),
    "delta, recursive": dict(residual="delta", delta_entries="recursive"),
    "delta, recursive, gated, 2 sites a block": dict(residual="delta", delta_entries="recursive", delta_gate=True, sites_per_block=2),
    "delta, recursive, 2 heads, 3 sites a block": dict(residual="delta", delta_entries="recursive", route_heads=2, sites_per_block=3),
    "hc_static": dict(residual="hc_static"),
    "hc": dict(residual="hc"),
    "hc, 3 streams": dict(residual="hc", n_stream=3),
    "mhc": dict(residual="mhc"),
    "mhc, 3 streams, learned readout": dict(residual="mhc", n_stream=3, mhc_readout="learned"),
}


def context(model, idx):
    return Context(model.cos[:idx.shape[1]], model.sin[:idx.shape[1]])


def callables(model, idx):
    return [lambda h, f=f: f(h, context(model, idx)) for f in model.sublayers]


def raw(model):
    return dict(model.pathway.named_parameters())


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same_body(model, other):
    """`model` with the body of `other`."""
    body = {name: w for name, w in other.state_dict().items() if not name.startswith("pathway.")}
    assert not model.load_state_dict(body, strict=False).unexpected_keys
    return model


# ----------------------------------------------------------------------------------------------------------------------
# against the equations


def test_variants_cover_every_pathway():
    assert {v["residual"] for v in VARIANTS.values()} == set(PATHWAYS)


@pytest.mark.parametrize("kernels", ["reference", "lean"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_literal_loop(variant, kernels):
    model, idx = random_model(n_layer=4, kernels=kernels, **VARIANTS[variant]), tokens(2, 7)
    logits = model(idx)[0]
    h = literal.readout(model.config, model.embed(idx), callables(model, idx), raw(model))
    expected = model.lm_head(model.norm(h))
    assert rel_rms(logits, expected) < 1e-12
    cotangent = normal(logits.shape)
    assert_close(gradients(model, logits, cotangent), gradients(model, expected, cotangent), 1e-11)


# not promised: delta blocks leave the open block out of the mean; hc_static starts with noise
STARTS_OTHERWISE = {name for name, v in VARIANTS.items() if v["residual"] == "hc_static" or v["residual"] == "delta" and
                    not v.get("delta_gate") and (v.get("sites_per_block", 1) > 1 or "delta_entries" in v)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_starts_as_the_plain_residual(variant):
    """
    At init every read is a mean over sources, which pre-norm cannot tell from their sum; given a negligible eps, that
    is, and embeddings of unit scale. DAR's gates are made neutral first.
    """
    tiny = dict(n_layer=4, norm_eps=1e-20)
    model = GPT(tiny_config(**VARIANTS[variant] | tiny)).double()
    plain = same_body(GPT(tiny_config(**tiny)).double(), model)
    with torch.no_grad():
        for m in (model, plain):
            m.embed.weight.div_(m.config.init_std)
            for name, p in m.sublayers.named_parameters():
                if name.endswith("proj.weight"):
                    p.mul_(10)                         # else the sublayers add little that could differ
        if model.config.residual in DAR_FAMILY:
            model.pathway.gate_weight.zero_()
    idx = tokens(2, 7)
    assert (rel_rms(model(idx)[0], plain(idx)[0]) < 1e-12) == (variant not in STARTS_OTHERWISE)


def test_a_closed_gate_changes_no_bit():
    """MHAR's conversion: a trained model with delta_gate added is the same function, bit for bit in fp32."""
    plain, idx = random_model().float(), tokens(2, 7)
    for form in (dict(), dict(sites_per_block=3), dict(sites_per_block=2, delta_entries="recursive", route_heads=4)):
        model = same_body(GPT(tiny_config(residual="delta", delta_gate=True, **form)), plain)
        assert model.pathway.gate.shape == (4, 1) and torch.equal(model(idx)[0], plain(idx)[0])
        with torch.no_grad():
            model.pathway.query[2] = normal((24,))     # a uniform mean of everything would be a multiple of h
            model.pathway.gate[2] += 1
        assert rel_rms(model(idx)[0], plain(idx)[0]) > 1e-3


def test_starting_point_is_not_trivial():
    """The sublayers of the test above do change the logits, and so would a wrong mix of them."""
    model, idx = random_model(residual="attnres"), tokens(2, 7)
    with torch.no_grad():
        model.pathway.query.zero_()
        before = model(idx)[0]
        model.pathway.query[3] += 1
    assert rel_rms(model(idx)[0], before) > 1e-2


@pytest.mark.parametrize("sites_per_block", [1, 3])
def test_one_head_is_attention_residuals(sites_per_block):
    attnres = random_model(residual="attnres", sites_per_block=sites_per_block)
    mhar = GPT(tiny_config(residual="mhar", route_heads=1, sites_per_block=sites_per_block)).double()
    mhar.load_state_dict(attnres.state_dict())
    idx = tokens(2, 7)
    assert torch.equal(mhar(idx)[0], attnres(idx)[0])
    several = GPT(tiny_config(residual="mhar", route_heads=2, sites_per_block=sites_per_block)).double()
    several.load_state_dict(attnres.state_dict())
    assert rel_rms(several(idx)[0], attnres(idx)[0]) > 1e-3


@pytest.mark.parametrize("residual, full", [("attnres", 1), ("mhar", 1), *((name, 2) for name in DAR_FAMILY)])
def test_default_is_the_full_form(residual, full):
    default, explicit = random_model(residual=residual), random_model(residual=residual, sites_per_block=full)
    coarser = random_model(residual=residual, sites_per_block=full + 1)
    idx = tokens(2, 7)
    assert torch.equal(default(idx)[0], explicit(idx)[0])
    assert rel_rms(coarser(idx)[0], explicit(idx)[0]) > 1e-3


@pytest.mark.parametrize("sites_per_block", [4, 9])
def test_one_block_over_all_sites_by_hand(sites_per_block):
    """Zero queries and one block: the mean of the embedding and the sum of all outputs so far."""
    model, idx = random_model(residual="attnres", sites_per_block=sites_per_block), tokens(2, 7)
    torch.nn.init.zeros_(model.pathway.query)
    x = model.embed(idx)
    total = torch.zeros_like(x)
    for site, f in enumerate(callables(model, idx)):
        total = total + f(x if site == 0 else (x + total) / 2)
    assert rel_rms(model.hidden(idx), model.norm((x + total) / 2)) < 1e-14


# ----------------------------------------------------------------------------------------------------------------------
# dual attention residuals


def streams_of(model, idx):
    """The final history of the two streams, open block included: 2 lists of (B, T, C)."""
    state = model.pathway.start(model.embed(idx))
    for site, f in enumerate(callables(model, idx)):
        h, carry = model.pathway.read(state, site)
        state = model.pathway.write(state, f(h), site, carry)
    history, open_block = state
    return [list(stream) for stream in zip(*history.closed, *[open_block] * (open_block is not None))]


def test_one_site_a_block_makes_the_streams_collinear():
    """Why sites_per_block=1 is refused: entries are multiples of one output, so keys of both streams are the same."""
    model, idx = random_model(residual="dar", norm_eps=1e-20), tokens(2, 7)
    x, sublayers, p = model.embed(idx), callables(model, idx), raw(model)
    for block in (1, 2):
        streams = []
        cross = literal.readout(model.config, x, sublayers, p, block=block, streams=streams)
        own = literal.dual_attention_residual(x, sublayers, p, block=block, eps=1e-20, **literal.ROLES["dar_selfkv"])
        collinear = all(F.cosine_similarity(a, b, dim=-1).min() > 1 - 1e-12 for a, b in zip(*streams))
        assert (rel_rms(own, cross) < 1e-12) == collinear == (block == 1)
    for name in DAR_FAMILY:
        with pytest.raises(ConfigError, match="sites_per_block >= 2, not 1.*keys of the two coincide"):
            ModelConfig(residual=name, sites_per_block=1)


def test_transport_is_doubly_stochastic():
    """Rows of M(rho) sum to 1: equal streams stay equal. Columns do: what two streams hold together is not changed."""
    pathway = random_model(residual="dar", sites_per_block=4).pathway
    p0, p1, y = (normal((2, 3, 24), seed) for seed in range(3))
    beta, rho = normal((2, 3, 2), 3).exp(), normal((2, 3, 1), 4).sigmoid()
    _, (q0, q1) = pathway.write((None, (p0, p0)), y, 1, (beta[..., :1].expand(2, 3, 2), rho))
    assert rel_rms(q0, p0 + beta[..., :1] * y) < 1e-15 and rel_rms(q1, q0) < 1e-15
    _, (q0, q1) = pathway.write((None, (p0, p1)), y, 1, (beta, rho))
    assert rel_rms(q0 + q1, p0 + p1 + beta.sum(-1, keepdim=True) * y) < 1e-15
    assert rel_rms(q0 - p0, p1 - p0) > 0.1             # and it does move something
    assert rel_rms(q0, p0 + (1 - rho) * (p1 - p0) + beta[..., :1] * y) < 1e-15


@pytest.mark.parametrize("residual", DAR_FAMILY)
def test_stream_labels_mean_nothing(residual):
    """Queries and gates exchanged between the streams exchange the streams. With fixed roles labels do matter."""
    model, idx = random_model(residual=residual, sites_per_block=3), tokens(2, 7)
    logits, streams = model(idx)[0], streams_of(model, idx)
    with torch.no_grad():
        model.pathway.query.copy_(model.pathway.query[:, [1, 0]])
        rows, columns = [1, 0, 3, 2, 4], [*range(24, 48), *range(24)]
        model.pathway.gate_weight.copy_(model.pathway.gate_weight[:, rows][:, :, columns])
        model.pathway.gate_bias.copy_(model.pathway.gate_bias[:, rows])
    exchanged, swapped = model(idx)[0], streams_of(model, idx)
    if residual == "dar_fixed":
        assert rel_rms(exchanged, logits) > 1e-3
        return
    assert rel_rms(exchanged, logits) < 1e-12
    for j in (0, 1):
        assert all(rel_rms(a, b) < 1e-12 for a, b in zip(swapped[j], streams[1 - j]))
    assert rel_rms(swapped[0][-1], streams[0][-1]) > 1e-2


@pytest.mark.parametrize("residual", DAR_FAMILY)
def test_neutral_dar_is_block_attention_residuals(residual):
    """Equal queries, M = I, beta = 1 and alpha = 1/2."""
    attnres = random_model(residual="attnres", sites_per_block=3)
    model = same_body(random_model(residual=residual, sites_per_block=3), attnres)
    with torch.no_grad():
        model.pathway.query.copy_(attnres.pathway.query[:, None].expand(-1, 2, -1))
        model.pathway.gain.copy_(attnres.pathway.gain)
        model.pathway.gate_weight.zero_()
        model.pathway.gate_bias.zero_()
        model.pathway.gate_bias[:, 4] = 50.0           # sigmoid(50) rounds to 1
    idx = tokens(2, 7)
    assert rel_rms(model(idx)[0], attnres(idx)[0]) < 1e-13


def test_streams_separate_in_training():
    """They do with the initial gates, and never would with gates of zero weight."""
    difference = {}
    for neutral in (False, True):
        model, idx = GPT(tiny_config(residual="dar", sites_per_block=4)).double(), tokens(4, 12)
        assert (model.pathway.gate_weight != 0).all()
        if neutral:
            torch.nn.init.zeros_(model.pathway.gate_weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            model(idx[:, :-1], idx[:, 1:])[1].backward()
            optimizer.step()
        s0, s1 = streams_of(model, idx)
        difference[neutral] = rel_rms(s0[-1], s1[-1])
    assert difference[False] > 0.05 and difference[True] < 1e-12


# ----------------------------------------------------------------------------------------------------------------------
# causality, live parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_causality(variant):
    model, idx = random_model(n_layer=4, **VARIANTS[variant]), tokens(2, 9)
    changed = idx.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 61
    before, after = model(idx)[0], model(changed)[0]
    assert rel_rms(after[:, :5], before[:, :5]) < 1e-14
    assert all(rel_rms(after[:, t], before[:, t]) > 1e-4 for t in range(5, 9))


def dead_entries(model, idx):
    """{name: mask} of the parameter entries that the loss cannot depend on."""
    dead = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    c, n_site = model.config, 2 * model.config.n_layer
    if not c.tie_embeddings:
        dead["embed.weight"][sorted(set(range(c.vocab_size)) - set(idx.flatten().tolist()))] = True
    if c.residual not in ["add"] + STREAMS:
        dead["pathway.query"][0] = dead["pathway.gain"][0] = True  # one source: nothing to choose
    if c.residual == "delta" and not c.delta_gate:                 # nor where the embedding is the only one
        lone = 1 + max(c.sites_per_block - 1, 0) + (c.delta_entries == "recursive")
        dead["pathway.query"][:lone] = dead["pathway.gain"][:lone] = True
    if c.residual == "hc_static":
        dead["pathway.alpha"][0] = True                            # equal streams: nothing to choose
    if c.residual == "mhc":                                        # rows of H_res sum to one, and its columns
        n, last = c.n_stream, slice(n_site - 1, n_site) if c.mhc_readout == "sum" else slice(0, 0)
        for name in ("pathway.weight", "pathway.bias"):
            dead[name][0, 2 * n:] = True                           # mixing equal streams changes none
            dead[name][last, 2 * n:] = True                        # mixing does not change the sum of the streams
        dead["pathway.scale"][0, 2] = dead["pathway.scale"][last, 2] = True
    if c.residual in DAR_FAMILY:
        for name in ("pathway.gate_weight", "pathway.gate_bias"):
            dead[name][0:n_site:c.sites_per_block, 4] = True       # rho: no open block to transport
            dead[name][n_site, 2:] = True                          # beta and rho: the readout writes nothing
    return dead


@pytest.mark.parametrize("variant, tied", [
    *((variant, False) for variant in VARIANTS), ("add", True), ("dar, 3 sites a block", True)])
def test_every_parameter_is_alive(variant, tied):
    """
    The gradient of every entry is non-zero, but exactly zero where `dead_entries` says so; and the loss moves by what
    the gradient predicts. (A large norm_eps: DAR's alpha at site 0 scales the input of a norm, so that its gradient is
    of the order of eps.)
    """
    model = random_model(norm_eps=1e-2, tie_embeddings=tied, n_layer=3, **VARIANTS[variant])
    idx, targets = tokens(2, 8), tokens(2, 8, seed=1)
    loss = model(idx, targets)[1]
    grads, dead = gradients(model, loss), dead_entries(model, idx)
    rounded = model.config.residual in ("hc_static", "mhc")        # their zeros are sums that cancel
    for name, g in grads.items():
        g[dead[name] & (g.abs() < 1e-12) & rounded] = 0
    wrong = {name: (found.sum().item(), dead[name].sum().item()) for name, g in grads.items()
             if not torch.equal(found := g == 0, dead[name])}
    assert not wrong, f"(entries with zero gradient, expected): {wrong}"

    def loss_with(p, value):
        p.copy_(value)
        return model(idx, targets)[1]

    with torch.no_grad():
        for seed, (name, p) in enumerate(model.named_parameters()):
            kept, step = p.clone(), normal(p.shape, seed) * ~dead[name]
            step = 1e-6 * (step + 2 * grads[name] * (step.norm() / grads[name].norm()))    # never across the gradient
            rise, fall = loss_with(p, kept + step), loss_with(p, kept - step)
            p.copy_(kept)
            predicted = 2 * (grads[name] * step).sum()
            assert predicted > 0 and abs((rise - fall) / predicted - 1) < 1e-4, name
        for name, p in model.named_parameters():
            p += dead[name] * normal(p.shape) * (0.1 if rounded else 10)       # 20 rounds of Sinkhorn do for small logits
        assert abs(model(idx, targets)[1] / loss - 1) < (1e-12 if rounded else 1e-300)


# ----------------------------------------------------------------------------------------------------------------------
# topology and depth weights

SOURCES = {  # sites_per_block: what each of the eight sites and the readout reads, four layers
    1: [["embedding"] + [f"site {i}" for i in range(site)] for site in range(9)],
    3: [["embedding"],
        ["embedding", "open sites 0-0"],
        ["embedding", "open sites 0-1"],
        ["embedding", "sites 0-2"],
        ["embedding", "sites 0-2", "open sites 3-3"],
        ["embedding", "sites 0-2", "open sites 3-4"],
        ["embedding", "sites 0-2", "sites 3-5"],
        ["embedding", "sites 0-2", "sites 3-5", "open sites 6-6"],
        ["embedding", "sites 0-2", "sites 3-5", "open sites 6-7"]],
    4: [["embedding"],
        ["embedding", "open sites 0-0"],
        ["embedding", "open sites 0-1"],
        ["embedding", "open sites 0-2"],
        ["embedding", "sites 0-3"],
        ["embedding", "sites 0-3", "open sites 4-4"],
        ["embedding", "sites 0-3", "open sites 4-5"],
        ["embedding", "sites 0-3", "open sites 4-6"],
        ["embedding", "sites 0-3", "sites 4-7"]],
}
CLOSING = {1: [], 3: [2, 5], 4: [3, 7]}


@pytest.mark.parametrize("residual, sites_per_block", [
    ("attnres", 1), ("mhar", 3), ("mhar", 4), ("dar", 3), ("dar_fixed", 4)])
def test_sources_and_description(residual, sites_per_block):
    model = GPT(tiny_config(n_layer=4, residual=residual, sites_per_block=sites_per_block))
    expected = SOURCES[sites_per_block]
    assert [model.pathway.sources(site) for site in range(9)] == expected
    title, *lines = model.describe().splitlines()
    assert f"residual={residual}" in title and f"{model.num_params():,} parameters" in title and "8 sites" in title
    assert len(lines) == 9
    for site, (line, sources) in enumerate(zip(lines, expected)):
        kind = "readout" if site == 8 else ("Attention", "FFN")[site % 2]
        assert line.split()[:4] == [str(site), kind, "reads", f"{len(sources)}:"]
        shown = line.split(": ", 1)[1].split("  | ")[0].split(", ")
        assert shown == sources if len(sources) <= 6 else shown == sources[:3] + ["..."] + sources[-2:]
    assert [site for site, line in enumerate(lines) if "closes its block" in line] == CLOSING[sites_per_block]


@pytest.mark.parametrize("variant", [name for name, v in VARIANTS.items() if v["residual"] not in ["add"] + STREAMS])
def test_depth_weights_are_those_of_the_reads(variant, monkeypatch):
    model, idx = random_model(n_layer=4, **VARIANTS[variant]), tokens(2, 7)
    reads, rung = [], RUNGS["reference"]

    def spy(values, query, gain, heads, eps, keys):
        reads.append((torch.stack(tuple(values)), rung.read(values, query, gain, heads, eps, keys)))
        return reads[-1][1]

    expected = model(idx)[0]
    monkeypatch.setitem(RUNGS, "reference", rung._replace(read=spy))
    weights = model.depth_weights(idx)
    streams, heads = 1 + (model.config.residual in DAR_FAMILY), model.config.route_heads
    n_read = 8 + (model.config.residual != "delta")
    assert [w.shape for w in weights] == [(streams, len(model.pathway.sources(site)), 2, 7, heads) for site in range(n_read)]
    assert all((w.sum(1) - 1).abs().max() < 1e-14 for w in weights)
    flat = [w_j for w in weights for w_j in w if len(w_j) > 1]     # a read of one source is no read
    assert len(flat) == len(reads)
    for w, (values, out) in zip(flat, reads):
        mix = (w.unsqueeze(-1) * values.unflatten(-1, (heads, -1))).sum(0).flatten(-2)
        assert rel_rms(out, mix) < 1e-14
    assert torch.equal(model(idx)[0], expected)                    # recording has ended and left no trace
    assert model.pathway.recorder is None


def test_plain_residual_does_not_choose():
    model = random_model()
    assert model.depth_weights(tokens(2, 7)) == []
    assert [model.pathway.sources(site) for site in range(5)] == [["running sum"]] * 5
    assert [line.split("reads ")[1] for line in model.describe().splitlines()[1:]] == [" 1: running sum"] * 5


# ----------------------------------------------------------------------------------------------------------------------
# initial weights and configuration


@pytest.mark.parametrize("residual", PATHWAYS)
def test_body_does_not_depend_on_the_pathway(residual):
    models = [GPT(tiny_config(residual=r), init_seed=seed) for r, seed in ((residual, 3), ("add", 3), ("add", 4))]
    body = [{name: p for name, p in m.named_parameters() if not name.startswith("pathway.")} for m in models]
    assert body[0].keys() == body[1].keys()
    for name, p in body[0].items():
        assert torch.equal(p, body[1][name])
        assert ("norm" in name) == torch.equal(p, body[2][name]) == bool((p == 1).all())
        assert "norm" in name or 0.9 < p.std() / 0.02 < 1.1


@pytest.mark.parametrize("residual", [name for name in PATHWAYS if name not in ["add"] + STREAMS])
def test_initial_pathway(residual):
    size = dict(residual=residual, d_model=192, n_layer=6)
    zero, random, again = (raw(GPT(tiny_config(query_init_std=std, **size))) for std in (0.0, 0.05, 0.05))
    assert (zero["query"] == 0).all() and (zero["gain"] == 1).all() and (random["gain"] == 1).all()
    assert 0.95 < random["query"].std() / 0.05 < 1.05 and random["query"].mean().abs() < 0.005
    assert torch.equal(random["query"], again["query"])
    if residual in DAR_FAMILY:
        assert 0.95 < zero["gate_weight"].std() / 0.02 < 1.05 and (zero["gate_weight"] != 0).all()
        assert torch.equal(zero["gate_bias"], torch.tensor([0.0, 0, 0, 0, 2]).expand(13, 5))


@pytest.mark.parametrize("residual", PATHWAYS)
def test_param_groups_partition_the_parameters(residual):
    model = GPT(tiny_config(residual=residual))
    groups = model.param_groups()
    names = ["body", "pathway", "pathway_static"]
    assert [g["name"] for g in groups] == names[:1 + (residual != "add") + (residual in ("hc", "mhc"))]
    assert ["weight_decay" in g for g in groups] == [False, False, True][:len(groups)]
    listed = [id(p) for g in groups for p in g["params"]]
    assert len(listed) == len(set(listed)) and set(listed) == {id(p) for p in model.parameters()}
    assert {id(p) for g in groups[1:] for p in g["params"]} == {id(p) for p in model.pathway.parameters()}


def test_default_heads():
    assert tiny_config(residual="mhar").route_heads == 2           # n_kv_head
    assert {tiny_config(residual=name).route_heads for name in ("attnres", "dar", "delta")} == {1}


@pytest.mark.parametrize("wrong, words", [
    (dict(residual="mahr"), ["'mahr'", "did you mean mhar?", "known: " + ", ".join(PATHWAYS)]),
    (dict(residual="dar_selfvk"), ["did you mean dar_selfkv?"]),
    (dict(residual="zzz"), ["'zzz'", "known: add, attnres"]),
    (dict(residual="mhar", route_heads=5), ["route_heads", "24", "5"]),
    (dict(residual="dar", route_heads=7), ["route_heads", "24", "7"]),
    (dict(residual="mhar", route_heads=0), ["route_heads", "24", "0"]),
    (dict(n_kv_head=3), ["n_kv_head", "4", "3"]),
    (dict(n_head=5, n_kv_head=5), ["n_head", "24", "5", "head_dim"]),
    (dict(n_head=8, n_kv_head=8), ["head_dim", "even", "3"]),
    (dict(residual="attnres", sites_per_block=0), ["sites_per_block", "1", "0"]),
    (dict(n_layer=0), ["n_layer", "1", "0"]),
    (dict(dropout=1.0), ["dropout", "1.0"]),
    (dict(norm_eps=0.0), ["norm_eps", "0.0"]),
    (dict(query_init_std=-0.1), ["query_init_std", "-0.1"]),
    (dict(residual="hc", n_stream=0), ["n_stream", "1", "0"]),
    (dict(residual="delta", delta_entries="recursiv"), ["delta_entries", "did you mean recursive?"]),
    (dict(residual="mhc", mhc_readout="mean"), ["mhc_readout='mean'", "known: sum, learned"]),
    (dict(rope_scaling={"rope_type": "yarn"}), ["rope_scaling", "'yarn'", "'llama3'"]),
    (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
     ["high_freq_factor, original_max_position_embeddings"]),
])
def test_impossible_configurations_say_why(wrong, words):
    with pytest.raises(ConfigError) as e:
        tiny_config(**wrong)
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value)


# ----------------------------------------------------------------------------------------------------------------------
# compiling, checkpointing, precision


@pytest.mark.parametrize("residual", PATHWAYS)
def test_compiled_sublayers_are_two_graphs(residual):
    """One for attention, one for the FFN, however many sites there are and however many sources each reads."""
    for n_layer in (2, 6):
        torch._dynamo.reset()
        model, idx, counter = random_model(residual=residual, n_layer=n_layer), tokens(2, 7), CompileCounter()
        expected = model(idx, idx)[1]
        for f in model.sublayers:
            f.compile(backend=counter)
        loss = model(idx, idx)[1]
        loss.backward()
        assert counter.frame_count == 2 and rel_rms(loss, expected) < 1e-14
    torch._dynamo.reset()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("config", [*(dict(residual=name) for name in PATHWAYS),
                                    dict(residual="dar", moe_n_expert=4, moe_d_ff=16, moe_aux_loss=0.1)], ids=str)
def test_activation_checkpointing_changes_nothing(config, dropout):
    """Loss and gradients in float32 are the same bits, and what is left to keep is what the pathway itself keeps."""
    model, idx, calls, kept = random_model(dropout=dropout, **config).float(), tokens(2, 7), [], []
    model.sublayers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    losses, grads = [], []
    for model.checkpoint in (False, True):
        calls.clear()
        torch.manual_seed(0)
        losses.append(model(idx, idx)[1])
        grads.append(gradients(model, losses[-1]))
        assert len(calls) == 1 + model.checkpoint                  # run again in backward, or not
        kept.append(saved_bytes(model, idx))
    inside = sum(f.saved_per_token() for f in model.sublayers) * idx.numel() * 4
    assert kept[0] - kept[1] > 0.7 * inside
    assert torch.equal(*losses) and all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    torch.manual_seed(1)
    assert (model(idx, idx)[1] == losses[0]) == (dropout == 0)


@pytest.mark.parametrize("residual", PATHWAYS)
def test_bf16_compute_keeps_fp32_weights(residual):
    model, idx = random_model(residual=residual).float(), tokens(2, 7)
    exact, exact_loss = model(idx)[0], model(idx, idx)[1]
    exact_grads = gradients(model, exact_loss)
    model.compute_dtype = torch.bfloat16
    assert model.hidden(idx).dtype == torch.bfloat16
    loss = model(idx, idx)[1]
    grads = gradients(model, loss)
    assert loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads.values())
    # one rounding to bf16 is 2^-9; dozens in a row come to 1 to 3 per cent of a logit, three times that of a gradient
    assert rel_rms(loss, exact_loss) < 0.01 and 1e-3 < rel_rms(model(idx)[0], exact) < 0.06
    everything, exact_everything = (torch.cat([g.flatten() for g in gs.values()]) for gs in (grads, exact_grads))
    assert rel_rms(everything, exact_everything) < 0.2


# ----------------------------------------------------------------------------------------------------------------------
# loss and counts


@pytest.fixture
def loss_case():
    h, weight = normal((24, 8), 0).requires_grad_(), normal((61, 8), 1).requires_grad_()
    targets = tokens(24)
    targets[[0, 7, 8, 23]] = -100
    return h, weight, targets


@pytest.mark.parametrize("rows", [1, 7, 12, 23, 24, 1000])         # of 24: a remainder of 3, even, one row over
def test_loss_in_pieces(loss_case, rows, monkeypatch):
    h, weight, targets = loss_case
    expected = F.cross_entropy(h @ weight.T, targets, reduction="none")
    cotangent = normal(24, 2)
    expected_grads = torch.autograd.grad(expected, (h, weight), cotangent)

    made, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *args: (made.append(len(args[0])), linear(*args))[1])
    monkeypatch.setattr(body, "LOGITS_AT_ONCE", rows * 61 + 60)
    losses = token_losses(h, weight, targets)
    grads = torch.autograd.grad(losses, (h, weight), cotangent)
    assert max(made) == min(rows, 24)                              # rows of logits in one piece
    assert rel_rms(losses, expected) < 1e-14 and (losses[targets < 0] == 0).all() and (losses[targets >= 0] > 0).all()
    for found, g in zip(grads, expected_grads):
        assert rel_rms(found, g) < 1e-14


@pytest.mark.parametrize("rows", [7, 1000])
def test_z_loss_is_in_the_gradient_only(loss_case, rows, monkeypatch):
    h, weight, targets = loss_case
    monkeypatch.setattr(body, "LOGITS_AT_ONCE", rows * 61)
    plain, scored = token_losses(h, weight, targets), targets >= 0
    z = (h @ weight.T).logsumexp(-1)[scored].square()
    losses = token_losses(h, weight, targets, z_loss=0.1)
    assert torch.equal(losses, plain)
    found = torch.autograd.grad(losses.sum() / scored.sum(), (h, weight))
    expected = torch.autograd.grad(plain.sum() / scored.sum() + 0.1 * z.mean(), (h, weight))
    without = torch.autograd.grad(token_losses(h, weight, targets).sum() / scored.sum(), (h, weight))
    for a, b, c in zip(found, expected, without):
        assert rel_rms(a, b) < 1e-14 and rel_rms(a, c) > 1e-2


def test_peak_memory_of_the_loss():
    """
    At the size of mhar_1b with 8 sequences, forward and backward; on the meta device, where tensors have sizes and nothing else.
    The unchunked loss holds the logits three times in fp32, 13.9 GiB; in chunks it takes 3.4 GiB, which are three of
    LOGITS_AT_ONCE and the gradient of the weight, and with twice the tokens no more. At most a quarter is asked.
    """
    peaks = []
    for at_once in (body.LOGITS_AT_ONCE, 2 ** 40):
        h, weight = (torch.empty(n, 1280, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (8 * 1024, 151_936))
        targets = torch.empty(8 * 1024, dtype=torch.long, device="meta")
        with pytest.MonkeyPatch.context() as patch, Memory([h, weight, targets]) as memory:
            patch.setattr(body, "LOGITS_AT_ONCE", at_once)
            token_losses(h, weight, targets).sum().backward()
        peaks.append(memory.peak)
    logits = 8 * 1024 * 151_936
    assert 11 * logits < peaks[1] < 13 * logits
    assert peaks[0] < 0.25 * peaks[1], [p / 2 ** 30 for p in peaks]


def test_loss_of_the_model():
    model, idx, targets = random_model(), tokens(2, 7), tokens(2, 7, seed=1)
    targets[0, :3] = -100
    logits, none = model(idx)
    assert none is None and logits.shape == (2, 7, 61)
    none, loss = model(idx, targets)
    assert none is None and rel_rms(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten())) < 1e-14
    each = model(idx, targets, reduction="none")[1]
    assert rel_rms(each, F.cross_entropy(logits.mT, targets, reduction="none")) < 1e-14
    assert torch.equal(model(idx, targets, z_loss=0.1)[1], loss)


# L = 1, C = 8, T = 5, V = 11; two query heads and one kv head of 4; d_ff = 12. Forward, a token:
#   attention     2 (8x8 + 2 8x4 + 8x8) = 384, and scores and mix over 5 tokens 4 x 5 x 8 = 160
#   FFN           2 (3 8x12) = 576
#   head          2 (8x11) = 176
#   a depth read  6 x 8 = 48 a source
@pytest.mark.parametrize("config, routing", [
    (dict(residual="add"), 0),
    (dict(residual="attnres"), (2 + 3) * 48),                              # site 1 reads 2 sources, the readout 3
    (dict(residual="mhar", route_heads=2), (2 + 3) * 48),                  # heads cost nothing
    (dict(residual="attnres", sites_per_block=2), (2 + 2) * 48),
    (dict(residual="dar"), 2 * (2 + 2) * 48 + 3 * 2 * (5 * 16)),           # two streams; three rows of 5 gates from 2C
    (dict(residual="delta"), 2 * 48),                                      # site 1 reads 2 sources
    (dict(residual="delta", delta_gate=True), 3 * 48),                     # and a null
    (dict(residual="hc_static"), 2 * (2 * 5 * 4 * 8 + 2 * 4 * 8)),         # a site: mix 4 streams to 5, write to 4
    (dict(residual="hc"), 2 * (2 * 5 * 4 * 8 + 2 * 4 * 8 + 2 * 4 * 6 * 8)),           # each of 4 streams gives 6 numbers
    (dict(residual="mhc", mhc_readout="learned"), 2 * (2 * 5 * 4 * 8 + 2 * 4 * 8 + 2 * 24 * 32) + 2 * 4 * 32),
])
def test_flops_by_hand(config, routing):
    model = GPT(tiny_config(n_layer=1, d_model=8, seq_len=5, vocab_size=11, n_head=2, n_kv_head=1, d_ff=12, **config))
    assert model.flops_per_token() == 3 * (384 + 160 + 576 + 176 + routing)
