"""Sampling: the cache changes nothing, the documented rules hold, and what cannot work is refused."""

import pytest
import torch

from helpers import random_model, rel_rms, tokens
import sampling as sampling_file
from body import KVCache
from errors import ConfigError
from model import PATHWAYS
from route_kernels import RUNGS
from sampling import draw

SEQ_LEN = 12


def sampler(residual="mhar", **kw):
    return random_model(residual=residual, seq_len=SEQ_LEN, **kw).eval()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def greedy_by_hand(model, idx, n):
    """Whole contexts through the model; when one is full, its newest half goes on."""
    text = idx
    context = idx[:, -SEQ_LEN:]
    for _ in range(n):
        token = model(context)[0][:, -1].argmax(-1, keepdim=True)
        text, context = torch.cat((text, token), 1), torch.cat((context, token), 1)
        if context.shape[1] > SEQ_LEN:
            context = context[:, -(SEQ_LEN // 2):]
    return text


# ----------------------------------------------------------------------------------------------------------------------
# the cache and the context


@pytest.mark.parametrize("residual", PATHWAYS)
def test_cached_hidden_states_are_the_uncached(residual):
    """Any split of the text into pieces, read one after the other by a batch of two."""
    model, idx = sampler(residual), tokens(2, SEQ_LEN)
    expected = model(idx)[0]
    splits = [(t, SEQ_LEN - t) for t in range(1, SEQ_LEN)] + [(1,) * SEQ_LEN, (5, 4, 3), (1, 10, 1), (SEQ_LEN,)]
    with torch.no_grad():
        for split in splits:
            cache = KVCache()
            logits = torch.cat([model.lm_head(model.hidden(piece, cache)) for piece in idx.split(split, dim=1)], dim=1)
            assert cache.length == SEQ_LEN and rel_rms(logits, expected) < 1e-10


@pytest.mark.parametrize("residual, prompt", [
    *((residual, prompt) for residual in PATHWAYS for prompt in (5, 30)),          # shorter and longer than the context
    *(("mhar", prompt) for prompt in (1, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1)),      # shortest, and about as long
])
def test_greedy_text_by_hand(residual, prompt):
    model, idx = sampler(residual), tokens(2, prompt)
    expected = greedy_by_hand(model, idx, 16)                      # past the end of the context, twice
    for use_cache in (True, False):
        assert torch.equal(model.generate(idx, 16, temperature=0, use_cache=use_cache), expected)


@pytest.mark.parametrize("residual", PATHWAYS)
def test_cached_sampling_is_the_uncached(residual):
    model, idx = sampler(residual), tokens(2, 5)
    sampling = dict(temperature=0.9, top_k=20, top_p=0.95)
    cached, uncached, other = (model.generate(idx, 25, generator=seeded(seed), use_cache=use_cache, **sampling)
                               for seed, use_cache in ((0, True), (0, False), (1, True)))
    assert torch.equal(cached, uncached) and not torch.equal(cached, other)


def test_cache_is_used(monkeypatch):
    model, read = sampler(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, cache=None: (read.append(idx.shape[1]), hidden(idx, cache))[1])
    model.generate(tokens(1, 9), 6, temperature=0)
    assert read == [9, 1, 1, 1, 6, 1]                              # full after 12 tokens: the newest 6 are read again


def test_context_of_one_token():
    model = random_model(residual="mhar", seq_len=1).eval()
    text = model.generate(tokens(1, 3), 4, temperature=0)[0]
    assert torch.equal(text[3:], model(text[2:-1, None])[0][:, 0].argmax(-1))      # each follows from the one before it


def test_rows_of_a_batch_do_not_touch_each_other():
    model, idx = sampler(), tokens(2, 5)
    assert torch.equal(model.generate(idx, 20, temperature=0),
                       torch.cat([model.generate(row[None], 20, temperature=0) for row in idx]))


FORMS = {residual: dict(residual=residual) for residual in PATHWAYS} | {
    "attnres blocks": dict(residual="attnres", sites_per_block=3), "dar blocks": dict(residual="dar", sites_per_block=4, route_heads=3),
    "delta blocks": dict(residual="delta", sites_per_block=2, route_heads=4, delta_gate=True),
    "delta recursive": dict(residual="delta", sites_per_block=2, delta_entries="recursive", delta_gate=True),
    "experts": dict(residual="mhar", moe_n_expert=4, moe_d_ff=16, moe_n_shared=1)}


@pytest.mark.parametrize("ends", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("form", FORMS)
def test_unequal_prompts_are_read_as_if_alone(form, ends, monkeypatch):
    """Shorter and longer than the context, which each fills at its own time, and read in pieces; with seeds of their own."""
    monkeypatch.setattr(sampling_file, "CHUNK", 5)
    model = sampler(n_layer=3, **FORMS[form])
    prompts = [tokens(1, length, seed=length)[0] for length in (1, 5, 12, 30, 7)]
    if ends:                                                              # the likeliest token, so that documents do end
        model.eot = torch.cat(list(model.stream(prompts, 20, temperature=0))).mode().values.item()
    for settings in (dict(temperature=0), dict(temperature=1.5, top_k=8)):
        alone = [torch.cat(list(model.stream(p[None], 20, generator=seeded(len(p)), **settings))) for p in prompts]
        found = torch.stack(list(model.stream(prompts, 20, generator=[seeded(len(p)) for p in prompts], **settings)), 1)
        assert torch.equal(found, torch.stack(alone))
        assert not ends or (found == model.eot).any()


@pytest.mark.parametrize("form", FORMS)
def test_single_tokens_are_read_like_many(form):
    """The histories of sampling against those of training: all steps of a batch of rows, in float64 and in bfloat16."""
    model, idx = sampler(n_layer=3, **FORMS[form]), tokens(3, SEQ_LEN)
    with torch.no_grad():
        expected = model(idx)[0]
        for dtype in (torch.float64, torch.bfloat16):
            whole, cache = model.to(dtype)(idx)[0], KVCache()
            found = torch.cat([model.lm_head(model.hidden(token, cache)) for token in idx.split(1, dim=1)], dim=1)
            assert found.dtype == dtype and rel_rms(found, expected) < max(1e-12, 1.5 * rel_rms(whole, expected))
    assert model.pathway.rung is RUNGS["lean"]


def test_rows_of_a_batch_share_the_generator_but_not_the_draw():
    model, idx = sampler(), tokens(1, 5).expand(2, -1)
    first, again = (model.generate(idx, 20, generator=seeded()) for _ in range(2))
    assert torch.equal(first, again) and not torch.equal(first[0], first[1])


def test_stream_yields_what_generate_returns():
    model, idx = sampler(), tokens(2, 5)
    text = model.generate(idx, 9, generator=seeded())
    assert text.shape == (2, 14) and torch.equal(text[:, :5], idx)
    assert torch.equal(torch.stack(list(model.stream(idx, 9, generator=seeded())), 1), text[:, 5:])
    assert torch.equal(model.generate(idx, 0), idx)


# ----------------------------------------------------------------------------------------------------------------------
# draws


def frequencies(logits, n=20_000, **sampling):
    """How often each id is drawn from a row of logits."""
    kw = dict(temperature=1.0, top_k=None, top_p=None, generator=seeded()) | sampling
    return draw(torch.tensor([logits]).double().expand(n, -1), **kw).bincount(minlength=len(logits)) / n


LOGITS = [0.0, 2.0, 1.0, -1.0, 1.5]


@pytest.mark.parametrize("sampling, kept", [
    (dict(), [0, 1, 2, 3, 4]),
    (dict(temperature=2.5), [0, 1, 2, 3, 4]),
    (dict(top_k=2), [1, 4]),
    (dict(top_k=3, temperature=0.5), [1, 2, 4]),
    (dict(top_p=0.5), [1, 4]),                        # probabilities .46 .28 .17 .06 .02 in order
    (dict(top_p=0.44), [1]),
    (dict(top_p=0.80), [1, 2, 4]),
    (dict(top_p=0.44, temperature=2.5), [1, 4]),      # after the temperature: .31 .26 .21 .14 .09
    (dict(top_k=4, top_p=0.93), [1, 2, 4]),           # after top_k: .47 .29 .17 .06, so that three reach .935
])
def test_draws_follow_the_distribution(sampling, kept):
    p = (torch.tensor(LOGITS).double() / sampling.get("temperature", 1.0)).exp()
    p = p * torch.zeros(5).index_fill(0, torch.tensor(kept), 1)
    p = p / p.sum()
    found = frequencies(LOGITS, **sampling)
    assert ((found > 0) == (p > 0)).all()
    assert (found - p).abs().max() < 0.015            # over four standard deviations of a mean of 20,000


@pytest.mark.parametrize("off", [dict(top_k=None), dict(top_k=0), dict(top_k=61), dict(top_k=1000), dict(top_p=1.0)])
def test_cuts_that_cut_nothing(off):
    model, idx = sampler(), tokens(2, 5)
    assert torch.equal(model.generate(idx, 20, generator=seeded(), **off), model.generate(idx, 20, generator=seeded()))


@pytest.mark.parametrize("strict", [dict(top_k=1), dict(top_p=1e-9), dict(temperature=1e-12), dict(temperature=1e-320)])
def test_cuts_that_leave_the_likeliest(strict):
    model, idx = sampler(), tokens(2, 5)
    assert torch.equal(model.generate(idx, 20, generator=seeded(), **strict), model.generate(idx, 20, temperature=0))


def test_ties_at_temperature_zero_go_to_the_lowest_id():
    assert draw(torch.tensor([[0.0, 2, 2, 1], [3, 3, 3, 3]]), 0, None, None, None).tolist() == [1, 0]


@pytest.mark.parametrize("sampling", [dict(temperature=0), dict(), dict(top_k=60), dict(top_p=0.999)])
def test_padding_ids_are_never_drawn(sampling):
    """Ids of 50 and more pad the embedding; here they would be by far the likeliest."""
    model, idx = sampler(tie_embeddings=False), tokens(2, 5, vocab=50)
    with torch.no_grad():
        model.lm_head.weight[50:] *= 20
    assert model.generate(idx, 30, generator=seeded(), **sampling).max() >= 50
    assert model.generate(idx, 30, generator=seeded(), n_vocab=50, **sampling).max() < 50


# ----------------------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize("wrong, words", [
    (dict(temperature=-0.5), "temperature.*-0.5"),
    (dict(top_k=-1), "top_k.*-1"),
    (dict(top_p=0.0), "top_p.*0.0"),
    (dict(top_p=1.5), "top_p.*1.5"),
    (dict(top_p=-0.1), "top_p.*-0.1"),
])
def test_impossible_sampling_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        sampler().generate(tokens(1, 5), 3, **wrong)


def test_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="prompt is empty"):
        sampler().generate(tokens(1, 0), 3)


def test_too_long_a_text_is_refused():
    model = sampler()
    with pytest.raises(ConfigError, match="13 tokens.*12"):
        model(tokens(1, SEQ_LEN + 1))
    cache = KVCache()
    model.hidden(tokens(1, 10), cache)
    with pytest.raises(ConfigError, match="13 tokens.*12"):
        model.hidden(tokens(1, 3), cache)


@pytest.mark.parametrize("sampling", [dict(), dict(temperature=0)])
def test_broken_weights_name_the_position(sampling):
    model = sampler()
    with torch.no_grad():
        model.norm.weight[3] = torch.nan
    with pytest.raises(ConfigError, match="non-finite logits at position 4:"):
        model.generate(tokens(1, 5), 3, **sampling)
    with pytest.raises(ConfigError, match=f"non-finite logits at position {SEQ_LEN - 1}:"):
        model.generate(tokens(1, 30), 3, **sampling)


def test_nan_met_on_the_way_names_its_position():
    """The embedding of one token is broken: sampling stops when it has been drawn."""
    model = sampler(tie_embeddings=False)
    text = model.generate(tokens(1, 4), 6, temperature=0)
    new = text[0, 4:].tolist()
    at = next(i for i in range(1, 6) if new[i] not in text[0, :4 + i].tolist())        # first met at position 4 + at
    with torch.no_grad():
        model.embed.weight[new[at]] = torch.nan
    seen = []
    with pytest.raises(ConfigError, match=f"position {4 + at}:"):
        for token in model.stream(tokens(1, 4), 20, temperature=0):
            seen.append(token.item())
    assert seen == new[:at + 1]
