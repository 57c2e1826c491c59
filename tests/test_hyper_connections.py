"""Hyper-connections against modules that others wrote, and what must hold of their maps."""

from types import SimpleNamespace

import pytest
import torch
from hyper_connections import HyperConnections
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from helpers import assert_close, gradients, random_model, rel_rms, tiny_config, tokens
from model import GPT, sinkhorn
from test_pathways import callables, normal

N, C = 4, 24


def copied(module, **values):
    """`module` in float64 with these values as leaves of the graph of ours, so that gradients reach our parameters."""
    module.double()
    for name, value in values.items():
        assert value.shape == getattr(module, name).shape, name
        delattr(module, name)
        setattr(module, name, value)
    return module


def compare(model, expected_hidden, idx):
    logits, expected = model(idx)[0], model.lm_head(model.norm(expected_hidden))
    assert rel_rms(logits, expected) < 1e-12
    cotangent = normal(logits.shape)
    assert_close(gradients(model, logits, cotangent), gradients(model, expected, cotangent), 1e-11)


def test_hc_equals_lucidrains():
    """W_m and W_r are the columns of his dynamic_alpha_fn, A_m and A_r those of static_alpha; his norm's gain is gamma + 1."""
    model, idx = random_model(n_layer=3, residual="hc", norm_eps=1e-30), tokens(2, 7)
    p, streams = model.pathway, torch.cat([model.embed(idx)] * N)          # his streams are in the batch: (b s), s fastest
    streams = streams.unflatten(0, (N, 2)).transpose(0, 1).flatten(0, 1)
    for site, f in enumerate(callables(model, idx)):
        his = copied(HyperConnections(N, dim=C, layer_index=site),
                     static_alpha=torch.cat((p.static_pre[site][:, None], p.static_res[site]), dim=1),
                     dynamic_alpha_fn=p.weight[site][:N + 1].T, dynamic_alpha_scale=p.scale[site][0],
                     static_beta=p.static_post[site], dynamic_beta_fn=p.weight[site][N + 1], dynamic_beta_scale=p.scale[site][1])
        copied(his.norm, gamma=p.gain[site] - 1)
        h, mixed, beta = his.width_connection(streams)
        streams = his.depth_connection(f(h), mixed, **beta)
    compare(model, streams.unflatten(0, (2, N)).sum(1), idx)


@pytest.mark.parametrize("site", range(6))
def test_hc_starts_as_lucidrains_does(site):
    p, his = GPT(tiny_config(n_layer=3, residual="hc")).pathway, HyperConnections(N, dim=C, layer_index=site)
    assert torch.equal(torch.cat((p.static_pre[site][:, None], p.static_res[site]), dim=1), his.static_alpha)
    assert torch.equal(p.static_post[site], his.static_beta) and torch.equal(p.gain[site], his.norm.gamma + 1)
    assert torch.equal(p.weight[site][:N + 1].T, his.dynamic_alpha_fn) and torch.equal(p.weight[site][N + 1], his.dynamic_beta_fn)
    assert torch.equal(p.scale[site], torch.stack((his.dynamic_alpha_scale, his.dynamic_beta_scale)))


@pytest.mark.parametrize("learned", [False, True])
def test_mhc_equals_deepseek_v4(learned, monkeypatch):
    """Its `fn` and `base` are our weight and bias, with res transposed: its comb[j, k] is our res[k, j]. Its hc_eps is zero
    here, and its .float() does nothing, so that both are float64."""
    monkeypatch.setattr(torch.Tensor, "float", lambda t: t)
    eps = 1e-6
    settings = SimpleNamespace(hc_mult=N, hc_sinkhorn_iters=20, hc_eps=0.0, rms_norm_eps=eps, hidden_size=C)
    model = random_model(n_layer=3, residual="mhc", norm_eps=eps, mhc_readout="learned" if learned else "sum")
    idx, p = tokens(2, 7), model.pathway
    order = [*range(2 * N), *(2 * N + N * k + j for j in range(N) for k in range(N))]
    streams = model.embed(idx).unsqueeze(2).repeat(1, 1, N, 1)
    for site, f in enumerate(callables(model, idx)):
        theirs = copied(DeepseekV4HyperConnection(settings), fn=p.weight[site][order], base=p.bias[site][order], scale=p.scale[site])
        post, comb, h = theirs(streams)
        streams = post.unsqueeze(-1) * f(h).unsqueeze(-2) + comb.transpose(-1, -2) @ streams
    head = copied(DeepseekV4HyperHead(settings), hc_fn=p.readout_weight, hc_base=p.readout_bias,
                  hc_scale=p.readout_scale) if learned else lambda x: x.sum(2)
    compare(model, head(streams), idx)


@pytest.mark.parametrize("residual, params", [           # n = 4, C = 24, a site
    ("hc_static", 4 + 16 + 4), ("hc", 24 + 24 * 6 + 4 * 6 + 2), ("mhc", (4 ** 2 + 2 * 4) * (4 * 24 + 1) + 3)])
def test_sizes(residual, params):
    model = GPT(tiny_config(residual=residual))
    assert model.pathway.num_params() == 4 * params
    streams = model.pathway.start(torch.zeros(2, 7, 24))
    assert streams.shape == (2, 7, 4, 24)


def test_published_size_of_mhc():
    with torch.device("meta"):
        pathway = GPT(tiny_config(residual="mhc", n_layer=1, d_model=1024)).pathway
    assert pathway.num_params() == 2 * 98_331


def test_initial_values():
    static, mhc = (GPT(tiny_config(n_layer=40, residual=r, mhc_readout="learned")).pathway for r in ("hc_static", "mhc"))
    for found, center in ((static.alpha, torch.zeros(4)), (static.res, torch.eye(4)), (static.post, torch.tensor([1.0, 0, 0, 0]))):
        assert 0.015 < (found - center).std() < 0.025 and (found - center).abs().max() < 0.1
    assert (mhc.weight == 0).all() and (mhc.readout_weight == 0).all() and (mhc.readout_bias == 0).all()
    assert (mhc.scale == 0.01).all() and mhc.readout_scale.tolist() == pytest.approx([0.01])
    pre, post, res = mhc.maps(normal((2, 3, 4, 24)), 5)
    assert pre.round(decimals=2)[0, 0].tolist() == [0.05, 0.95, 0.05, 0.05] and (post == 1).all()
    assert (res.diagonal(dim1=-2, dim2=-1) > 0.99).all()


def test_streams_of_mhc_separate_in_training():
    """They would stay equal for ever if all streams were read alike at the start."""
    difference = {}
    for alike in (False, True):
        model, idx = GPT(tiny_config(residual="mhc")).double(), tokens(4, 12)
        if alike:
            torch.nn.init.zeros_(model.pathway.bias[:, :4])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            model(idx[:, :-1], idx[:, 1:])[1].backward()
            optimizer.step()
        streams = model.pathway.start(model.embed(idx))
        for site, f in enumerate(callables(model, idx)):
            h, carry = model.pathway.read(streams, site)
            streams = model.pathway.write(streams, f(h), site, carry)
        difference[alike] = rel_rms(streams[..., 0, :], streams[..., 1, :])
    assert difference[False] > 1e-3 and difference[True] < 1e-12


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_sinkhorn(scale):
    """Rows sum to one to rounding, columns when it has converged; and no number is out of range, however large the logits."""
    m = sinkhorn(scale * normal((50, 4, 4)))
    assert torch.isfinite(m).all() and (m >= 0).all() and (m.sum(-1) - 1).abs().max() < 1e-14
    if scale <= 1:
        assert (m.sum(-2) - 1).abs().max() < 1e-6 and m.std() > scale / 100
    assert torch.isfinite(sinkhorn(1000 * normal((50, 4, 4)).float())).all()


def test_the_mixed_streams_go_on():
    """What a site does not write itself comes from H_res: other maps, other logits; and equal streams stay equal."""
    model, idx = random_model(n_layer=3, residual="mhc"), tokens(2, 7)
    before = model(idx)[0]
    with torch.no_grad():
        model.pathway.bias[3, 8:] += normal((16,))
    assert rel_rms(model(idx)[0], before) > 1e-3
    x = normal((2, 7, 24))
    streams = model.pathway.start(x)
    _, carry = model.pathway.read(streams, 3)
    assert rel_rms(model.pathway.write(streams, torch.zeros_like(x), 3, carry), streams) < 1e-14


@pytest.mark.parametrize("residual", ["hc_static", "hc", "mhc"])
def test_maps_are_fp32_under_bf16(residual):
    """Streams of bf16 are mixed in fp32: the error is that of rounding h and the new streams once."""
    pathway = random_model(residual=residual).pathway.float()
    streams, y = normal((2, 5, 4, 24)).bfloat16(), normal((2, 5, 24), 1).bfloat16()
    h, carry = pathway.read(streams, 1)
    wide, wide_carry = pathway.double().read(streams.double(), 1)
    assert h.dtype == torch.bfloat16 and rel_rms(h, wide) < 2 ** -9
    new = pathway.float().write(streams, y, 1, carry)
    assert new.dtype == torch.bfloat16
    assert rel_rms(new, pathway.double().write(streams.double(), y.double(), 1, wide_carry)) < 2 ** -9
