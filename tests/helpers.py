"""What several test files use."""

import random

import torch

from model import GPT, ModelConfig


def rel_rms(a, b, floor=1e-3):
    """
    rms(a - b) / max(rms(b), floor). The floor is for gradients that are zero in exact arithmetic: with a tolerance of
    1e-10 they may be off by 1e-13. NaN compares false with any tolerance, so it fails.
    """
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=floor)).item()


def assert_close(found, expected, tol):
    """Every tensor of dict `found` is within relative RMS `tol` of the one of that name in `expected`."""
    assert found.keys() == expected.keys()
    errors = {name: rel_rms(found[name], expected[name]) for name in found}
    bad = {name: error for name, error in errors.items() if not error <= tol}
    assert not bad, f"beyond {tol}: {bad}"


def tiny_config(**kw):
    return ModelConfig(**{**dict(vocab_size=61, seq_len=16, n_layer=2, n_head=4, n_kv_head=2, d_model=24, d_ff=40,
                                 residual="add"), **kw})


def randomize(model, seed=0):
    """`model` in float64, every parameter random: nothing is zero, one, or the same as its neighbour."""
    model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            if name.endswith(("norm.weight", "gain")):
                p.copy_(1 + 0.3 * noise)
            elif name.endswith(("query", "gate_bias")):
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * p.shape[-1] ** -0.5)
    return model


def random_model(seed=0, kernels="lean", **kw):
    return randomize(GPT(tiny_config(**kw), kernels=kernels), seed)


def tokens(*shape, vocab=61, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, output, cotangent=None):
    """{name: gradient} of <output, cotangent> for every parameter; each must take part."""
    names, params = zip(*model.named_parameters())
    return dict(zip(names, torch.autograd.grad(output, params, cotangent)))


def write_corpus(folder, n_documents=120):
    """A data folder of byte tokens made from pseudo-random words, the same on every machine; about 40,000 tokens."""
    from prepare_data import prepare
    from tokenizer import load_tokenizer
    rng, words = random.Random(0), "depth site source query key value head block stream gate sum mean norm read".split()
    files = []
    for i in range(n_documents):
        length = 20 + int(rng.random() * 80)
        files.append(folder.with_name(folder.name + f"_{i:03d}.txt"))
        files[-1].write_text(" ".join(words[int(rng.random() * len(words))] for _ in range(length)), encoding="utf-8")
    prepare(files, load_tokenizer("byte"), folder, val_permille=100)
    return folder
