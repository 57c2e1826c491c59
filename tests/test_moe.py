"""The sparse mixture of experts: against DeepSeek-V3's module, a loop over experts, and what must hold of it."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

import body
from body import FFN, GroupedLinear, MoE, grouped_matmul
from helpers import assert_close, gradients, random_model, rel_rms, tiny_config, tokens
from model import GPT, ConfigError, Context
from test_pathways import normal

SPARSE = dict(moe_n_expert=5, moe_top_k=2, moe_d_ff=16, moe_n_shared=1)
CONTEXT = Context(None, None, aux={})


def random_moe(**kw):
    model = random_model(**SPARSE | kw)
    f = model.sublayers[1]
    f.bias.copy_(0.3 * normal((5,)))
    return f


def test_equals_deepseek_v3():
    """Forward and every gradient; its biggest differences: gate and up are one matrix, shared experts have their own class."""
    f = random_moe(moe_n_shared=2)
    theirs = DeepseekV3MoE(DeepseekV3Config(
        hidden_size=24, moe_intermediate_size=16, num_local_experts=5, n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=2, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0)).double()
    own = dict(f.named_parameters())
    mapped = {"gate.weight": own["router.weight"], "experts.down_proj": own["down_proj.weight"],
              "experts.gate_up_proj": torch.cat((own["gate_proj.weight"], own["up_proj.weight"]), dim=1),
              **{f"shared_experts.{name}.weight": own[f"shared.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")}}
    assert mapped.keys() == dict(theirs.named_parameters()).keys()
    theirs.gate.e_score_correction_bias = f.bias
    x, dout = normal((2, 9, 24)), normal((2, 9, 24), 1)
    found = f(x, CONTEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "type", lambda t, dtype: t)            # they score in float32
        expected = torch.func.functional_call(theirs, mapped, (f.norm(x),))
    assert rel_rms(found, expected) < 1e-12
    names = [name for name in own]
    a, b = (torch.autograd.grad(y, [own[name] for name in names], dout) for y in (found, expected))
    assert_close(dict(zip(names, a)), dict(zip(names, b)), 1e-11)


def test_equals_a_loop_over_tokens():
    f = random_moe(moe_n_shared=0)
    x = normal((1, 6, 24))
    found = f(x, CONTEXT)
    for t in range(6):
        token = f.norm(x)[0, t]
        score = 1 / (1 + torch.exp(-f.router.weight @ token))
        best = sorted(range(5), key=lambda e: -(score[e] + f.bias[e]))[:2]
        out = 0
        for e in best:
            hidden = F.silu(f.gate_proj.weight[e] @ token) * (f.up_proj.weight[e] @ token)
            out = out + score[e] / sum(score[best]) * (f.down_proj.weight[e] @ hidden)
        assert rel_rms(found[0, t], out) < 1e-13


@pytest.mark.parametrize("counts", [[7, 0, 1, 12], [0, 0, 0, 20], [20, 0, 0, 0]])
def test_grouped_matmul_equals_the_loop(counts, dtype=torch.bfloat16, tol=4e-3):
    """Against the loop in float64, output and gradients, with groups of no row; in float64 the module is the loop."""
    ends = torch.tensor(counts).cumsum(0).int()
    x, dout = normal((20, 24)).to(dtype), normal((20, 16), 2).to(dtype)
    layer = GroupedLinear(4, 24, 16)
    layer.weight.data = normal((4, 16, 24), 1).to(dtype)
    results = []
    for run in (layer, lambda x, ends: grouped_matmul(x, layer.weight.mT, ends)):
        for as_dtype in (dtype, torch.float64):
            layer.weight.data = layer.weight.data.to(as_dtype)
            inputs = x.to(as_dtype).requires_grad_(), layer.weight
            y = run(inputs[0], ends)
            results.append((y, *torch.autograd.grad(y, inputs, dout.to(as_dtype))))
        layer.weight.data = layer.weight.data.to(dtype)
    grouped, same, loop, truth = results
    for a, b, c, d in zip(grouped, same, loop, truth):
        assert rel_rms(a, d) < tol and rel_rms(c, d) < tol and torch.equal(b, d)
    start = 0
    for e, stop in enumerate(ends.tolist()):                               # and the loop is what it says
        assert rel_rms(truth[0][start:stop], x[start:stop].double() @ layer.weight[e].double().T) < 1e-14 or start == stop
        start = stop


def test_whole_sublayer_grouped_equals_loop(monkeypatch):
    f, x, dout = random_moe().bfloat16(), normal((2, 9, 24)).bfloat16(), normal((2, 9, 24), 1).bfloat16()
    results, calls, grouped_mm = [], [], F.grouped_mm
    for run in (grouped_mm, grouped_matmul):
        monkeypatch.setattr(F, "grouped_mm", lambda x, w, offs: (calls.append(run), run(x, w, offs=offs) if run is grouped_mm
                                                                 else run(x, w, offs))[1])
        y = f(x, CONTEXT)
        results.append({"y": y} | gradients(f, y, dout))
    assert calls == [grouped_mm] * 3 + [grouped_matmul] * 3
    assert_close(results[0], results[1], 1e-2)


def test_no_token_is_dropped_and_load_is_counted():
    f = random_moe().train()
    f.bias.copy_(torch.tensor([5.0, 0, 0, 0, 0]))                          # everybody takes expert 0
    for _ in range(2):
        f(normal((3, 7, 24)), CONTEXT)
    assert f.load.sum() == 2 * 3 * 7 * 2 and f.load[0] == 2 * 3 * 7
    f.eval()(normal((3, 7, 24)), CONTEXT)
    assert f.load.sum() == 84
    f.balance(f.load)
    assert (f.load == 0).all()


def test_balance_converges_on_a_skewed_input():
    """Tokens that all look alike, so that at first two experts get most; the bias spreads them and leaves weights alone."""
    torch.manual_seed(0)
    f = MoE(tiny_config(**SPARSE | dict(moe_bias_rate=0.003)))
    for p in f.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, worst = torch.randn(4, 64, 24) + 3 * torch.randn(24), []
    for _ in range(300):
        f(x, CONTEXT)
        worst.append((f.load.max() / f.load.mean()).item())
        f.balance(f.load.clone())
    assert worst[0] > 2 and max(worst[-20:]) < 1.1


def test_bias_moves_by_its_rate_towards_balance():
    f = MoE(tiny_config(**SPARSE | dict(moe_bias_rate=0.25)))
    f.balance(torch.tensor([4.0, 8.0, 2.0, 6.0, 5.0]))                     # mean 5
    assert f.bias.tolist() == [0.25, -0.25, 0.25, -0.25, 0]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_auxiliary_loss_is_in_the_gradient_once(checkpoint):
    """E sum_e f_e p_e of every sparse layer, also when sublayers run again in backward."""
    idx, targets = tokens(2, 7), tokens(2, 7, seed=1)
    model, plain = (random_model(**SPARSE | dict(moe_aux_loss=aux), n_layer=2, moe_n_dense=1) for aux in (0.5, 0.0))
    model.checkpoint = checkpoint
    loss, base = model(idx, targets)[1], plain(idx, targets)[1]
    assert torch.equal(loss, base)
    found, without = gradients(model, loss), gradients(plain, base)
    f, seen = plain.sublayers[3], []
    hook = f.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    plain(idx)
    hook.remove()
    scores = (f.norm(seen[0]) @ f.router.weight.T).sigmoid().flatten(0, 1)
    share = F.one_hot((scores + f.bias).topk(2).indices, 5).double().sum((0, 1)) / (14 * 2)
    aux = 0.5 * 5 * (share * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
    extra = torch.autograd.grad(aux, list(plain.parameters()), allow_unused=True, materialize_grads=True)
    assert_close(found, {name: without[name] + e for name, e in zip(without, extra)}, 1e-12)
    assert rel_rms(found["sublayers.3.router.weight"], without["sublayers.3.router.weight"]) > 1e-2


def test_layers_parameters_and_flops():
    """Three layers, the first dense; C = 24, E = 5 experts of 16, two of them taken, and a shared one."""
    model, dense = (GPT(tiny_config(n_layer=3, **extra)) for extra in (SPARSE | dict(moe_n_dense=1), {}))
    assert [type(f) for f in model.sublayers][1::2] == [FFN, MoE, MoE]
    expert, ffn = 3 * 24 * 16, 3 * 24 * 40
    assert model.num_params() - dense.num_params() == 2 * (24 * 5 + 6 * expert - ffn)
    assert model.num_active_params() == model.num_params() - 2 * 3 * expert
    assert model.flops_per_token() - dense.flops_per_token() == 3 * 2 * 2 * (24 * 5 + 3 * expert - ffn)
    assert f"({model.num_active_params():,} active a token)" in model.describe().splitlines()[0]
    assert " MoE " in model.describe().splitlines()[4]


@pytest.mark.parametrize("residual", ["add", "dar"])
def test_causality_and_generation(residual):
    model, idx = random_model(residual=residual, **SPARSE), tokens(2, 9)
    changed = idx.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 61
    before, after = model(idx)[0], model(changed)[0]
    assert rel_rms(after[:, :5], before[:, :5]) < 1e-14 and rel_rms(after[:, 5:], before[:, 5:]) > 1e-3
    model.eval()
    cached = model.generate(idx, 5, temperature=0)
    assert torch.equal(cached, model.generate(idx, 5, temperature=0, use_cache=False)) and cached.shape == (2, 14)


def test_router_scores_are_fp32_under_bf16(monkeypatch):
    f = MoE(tiny_config(**SPARSE))
    for p in f.parameters():
        torch.nn.init.normal_(p, std=0.3)
    seen, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, *b: (seen.append((x.dtype, w.dtype)), linear(x, w, *b))[1])
    y = f(normal((1, 4, 24)).bfloat16(), CONTEXT)
    assert seen[0] == (torch.float32, torch.float32) and y.dtype == torch.bfloat16


def test_compiled_sublayer_is_one_graph():
    torch._dynamo.reset()                                                  # of what other tests compiled
    model, idx = random_model(**SPARSE, moe_aux_loss=0.5).float(), tokens(2, 7)
    model.compute_dtype = torch.bfloat16
    expected = gradients(model, model(idx, idx)[1])
    for f in model.sublayers:
        f.compile(backend="eager", fullgraph=True)
    assert_close(gradients(model, model(idx, idx)[1]), expected, 1e-6)


@pytest.mark.parametrize("wrong, words", [
    (dict(moe_top_k=6), ["moe_top_k=6", "moe_n_expert=5"]), (dict(moe_top_k=0), ["moe_top_k=0"]),
    (dict(moe_d_ff=None), ["moe_d_ff", "None"]), (dict(moe_d_ff=12), ["moe_d_ff", "8", "12"]),
    (dict(d_model=20, head_dim=6), ["d_model", "8", "20"]), (dict(moe_n_dense=3), ["moe_n_dense=3", "n_layer=2"]),
    (dict(moe_n_expert=-1), ["moe_n_expert", "-1"]), (dict(moe_n_shared=-1), ["moe_n_shared", "-1"]),
    (dict(moe_aux_loss=-0.1), ["moe_aux_loss", "-0.1"])])
def test_impossible_sizes_say_why(wrong, words):
    with pytest.raises(ConfigError) as e:
        tiny_config(**SPARSE | wrong)
    assert all(word in str(e.value) for word in words)
