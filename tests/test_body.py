"""With the plain residual the model is Qwen3 and Llama: logits and every gradient as Hugging Face's, in float64."""

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from helpers import assert_close, gradients, random_model, rel_rms, tiny_config, tokens
from model import GPT, ModelConfig, rope_tables

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}

CASES = {
    "qwen3": dict(qk_norm=True, tie_embeddings=True),
    "qwen3 untied, head_dim not d_model / n_head": dict(qk_norm=True, tie_embeddings=False, head_dim=10),
    "qwen3, one query head per kv head, large eps": dict(qk_norm=True, n_kv_head=4, norm_eps=0.1),
    "llama untied": dict(qk_norm=False, tie_embeddings=False),
    "llama tied, all query heads on one kv head": dict(qk_norm=False, tie_embeddings=True, n_kv_head=1),
    # heads of 16 with theta 100: of the 8 frequencies some are kept, some blended and some divided by the factor
    "llama 3 rope": dict(qk_norm=False, tie_embeddings=False, head_dim=16, rope_theta=100.0, rope_scaling=LLAMA3),
}


class WideRMSNorm(nn.Module):
    """Hugging Face's norms compute in float32 whatever their input is; this one computes in the input's dtype."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())


def our_name(name):
    """Our name of a Hugging Face parameter."""
    def sublayer(match):
        layer, part = int(match[1]), match[2]
        part = part.replace("self_attn.", "").replace("mlp.", "")
        part = part.replace("input_layernorm", "norm").replace("post_attention_layernorm", "norm")
        return f"sublayers.{2 * layer + ('mlp' in match[2] or 'post_attention' in match[2])}.{part}"

    name = name.removeprefix("model.").replace("embed_tokens", "embed")
    return re.sub(r"layers\.(\d+)\.(.*)", sublayer, name)


def hugging_face(model):
    """Hugging Face's model with the weights of ours, in float64."""
    c = model.config
    config_class, model_class = (Qwen3Config, Qwen3ForCausalLM) if c.qk_norm else (LlamaConfig, LlamaForCausalLM)
    config = config_class(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim,
        max_position_embeddings=c.seq_len, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_embeddings,
        use_cache=False,
        rope_parameters={"rope_theta": c.rope_theta, **(c.rope_scaling or {"rope_type": "default"})},
        attn_implementation="sdpa")                # its eager attention takes the softmax in float32
    theirs = model_class(config).double()
    for module in list(theirs.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, WideRMSNorm(child))
    ours = dict(model.named_parameters())
    assert sorted(our_name(name) for name, _ in theirs.named_parameters()) == sorted(ours)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(ours[our_name(name)])
    return theirs


@pytest.mark.parametrize("case", CASES)
def test_equals_hugging_face(case):
    model = random_model(seq_len=40, n_layer=3, **CASES[case])
    theirs = hugging_face(model)
    idx = tokens(2, 24)
    logits, expected = model(idx)[0], theirs(idx).logits
    assert expected.dtype == torch.float64 and rel_rms(logits, expected) < 1e-10

    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = gradients(model, logits, cotangent)
    assert_close(found, {our_name(k): g for k, g in gradients(theirs, expected, cotangent).items()}, 1e-10)

    # next-token loss; Hugging Face's own takes it in float32
    targets = torch.cat((idx[:, 1:], torch.full((2, 1), -100)), dim=1)
    loss = model(idx, targets)[1]
    expected = F.cross_entropy(theirs(idx).logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    assert rel_rms(loss, expected) < 1e-10
    assert_close(gradients(model, loss), {our_name(k): g for k, g in gradients(theirs, expected).items()}, 1e-10)


def test_llama3_rope_case_has_all_three_kinds_of_frequency():
    c = random_model(**CASES["llama 3 rope"]).config
    wavelength = 2 * torch.pi * c.rope_theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
    turns = LLAMA3["original_max_position_embeddings"] / wavelength
    assert (turns > 4).any() and (turns < 1).any() and ((turns > 1) & (turns < 4)).any()


@pytest.mark.parametrize("head_dim, theta, scaling", [
    (128, 1e6, {}),                                                                              # Qwen3
    (80, 1e4, {}),                                                                               # the MHAR paper's 1B
    (128, 5e5, {**LLAMA3, "original_max_position_embeddings": 8192}),                            # Llama 3.1
    (64, 5e5, {**LLAMA3, "original_max_position_embeddings": 8192, "factor": 32.0}),             # Llama 3.2
    (16, 1e2, {**LLAMA3, "original_max_position_embeddings": 64}),
])
def test_rope_tables_are_hugging_faces(head_dim, theta, scaling):
    """Bit for bit: an angle far into the context magnifies the last bit of its frequency."""
    tables = rope_tables(tiny_config(head_dim=head_dim, rope_theta=theta, seq_len=9000, rope_scaling=scaling or None))
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=9000,
                         rope_parameters={"rope_theta": theta, **(scaling or {"rope_type": "default"})})
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(9000)[None])
    for found, table in zip(tables, expected):
        assert torch.equal(found, table[0])


@pytest.mark.parametrize("size, body, routing", [
    (dict(d_model=512, n_layer=12, n_head=8, n_kv_head=4, d_ff=1536), 115_554_304, 25_600),
    (dict(d_model=1024, n_layer=24, n_head=16, n_kv_head=8, d_ff=4096), 533_123_072, 100_352),
    (dict(d_model=1280, n_layer=36, n_head=16, n_kv_head=8, d_ff=5120), 1_079_313_280, 186_880),
])
def test_parameter_counts_of_the_mhar_paper(size, body, routing):
    with torch.device("meta"):
        add, attnres, mhar = (GPT(ModelConfig(residual=name, **size)) for name in ("add", "attnres", "mhar"))
    assert add.num_params() == body and add.pathway.num_params() == 0
    assert attnres.num_params() == mhar.num_params() == body + routing
    assert attnres.pathway.num_params() == mhar.pathway.num_params() == routing
