"""Attention that ends at document borders: as if each document were alone."""

import pytest
import torch

import eval as eval_file
from helpers import gradients, assert_close, random_model, rel_rms, tokens
from model import PATHWAYS, documents
from test_train import config_file, corpus, log_of, losses, run  # noqa: F401 (fixtures)

EOT = 60


def joined(*lengths, start_inside=False):
    """One row: documents of these lengths, each after an end of text (the first not, if it starts inside of one)."""
    ids = tokens(1, sum(lengths) + len(lengths), vocab=EOT, seed=sum(lengths))
    at = 0
    for length in lengths:
        ids[0, at] = EOT
        at += length + 1
    return ids[:, 1:] if start_inside else ids


def test_masks_and_positions_by_hand():
    mask, position = documents(torch.tensor([[5, EOT, 7, 8, EOT, EOT]]), EOT)
    assert position.tolist() == [[0, 0, 1, 2, 0, 0]]
    assert mask.int().tolist() == [[[[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0],
                                     [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]]]


@pytest.mark.parametrize("start_inside", [False, True])
@pytest.mark.parametrize("config", [*(dict(residual=r) for r in PATHWAYS), dict(residual="dar", moe_n_expert=4, moe_d_ff=16)], ids=str)
def test_equals_each_document_alone(config, start_inside):
    model, ids = random_model(seq_len=32, **config), joined(4, 7, 1, 6, start_inside=start_inside)
    model.eot = EOT
    starts = sorted({0, *(ids[0] == EOT).nonzero().flatten().tolist()}) + [ids.shape[1]]
    assert len(starts) == 5
    together = model(ids)[0]
    alone = torch.cat([model(ids[:, a:b])[0] for a, b in zip(starts, starts[1:])], dim=1)
    assert rel_rms(together, alone) < 1e-12
    cotangent = torch.randn(together.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(gradients(model, together, cotangent), gradients(model, alone, cotangent), 1e-11)
    model.eot = None
    assert rel_rms(model(ids)[0], together) > 1e-2                         # they do see each other otherwise


def test_rows_have_borders_of_their_own():
    model = random_model(seq_len=32)
    model.eot = EOT
    a, b = joined(4, 7, 6), joined(9, 8)
    b = torch.cat((b, tokens(1, a.shape[1] - b.shape[1], vocab=EOT)), dim=1)
    both = model(torch.cat((a, b)))[0]
    assert rel_rms(both, torch.cat((model(a)[0], model(b)[0]))) < 1e-13


def test_nothing_crosses():
    model, ids = random_model(residual="dar", seq_len=32), joined(5, 5)
    model.eot = EOT
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] + 1) % EOT
    a, b = model(ids)[0], model(changed)[0]
    assert torch.equal(a[:, 6:], b[:, 6:]) and rel_rms(a[:, 3:6], b[:, 3:6]) > 1e-3


@pytest.mark.parametrize("residual", ["add", "mhar", "mhc"])
def test_generation_starts_anew_after_an_end_of_text(residual):
    """With and without a cache, past borders in the prompt, drawn ones, and the end of the context."""
    model, prompt = random_model(residual=residual).eval(), joined(3, 4)
    model.eot = EOT

    def generate(prompt, seed, **how):
        return model.generate(prompt, 40, temperature=2.0, generator=torch.Generator().manual_seed(seed), **how)

    seed = next(seed for seed in range(50) if (generate(prompt, seed)[:, 9:-9] == EOT).any())
    drawn = generate(prompt, seed)
    assert torch.equal(drawn, generate(prompt, seed, use_cache=False))
    assert torch.equal(drawn[:, 4:], generate(prompt[:, 4:], seed))        # what stood before does not matter


def test_training_and_evaluation_mask_alike(run, capsys):
    plain, masked = run("plain"), run("masked", doc_mask=True)
    assert losses(plain)[6] != losses(masked)[6]
    eval_file.main(["loss", str(masked), "--tokens", "512"])
    logged = [r["val_loss"] for r in log_of(masked) if "val_loss" in r][-1]
    assert f"{logged:.4f}" in capsys.readouterr().out
    run("masked", doc_mask=False, max_steps=7)
    assert "changed doc_mask: True -> False" in capsys.readouterr().out
