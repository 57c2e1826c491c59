"""
Sampling: prompts of any lengths, read as one batch, and the tokens that follow them.

Rows of unequal length are padded on the left. A row of the batch draws what it would draw by itself, up to rounding.
"""

import torch

from body import KVCache
from errors import ConfigError

CHUNK = 2048                              # tokens of a prompt that are read at once


@torch.no_grad()
def stream(model, prompts, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_vocab=None, generator=None, use_cache=True):
    """
    Yield up to max_new_tokens tensors (B,), the tokens that follow `prompts`: (B, T), or B tensors (T_b,), T >= 1.

    temperature 0 takes the likeliest token; top_k (None or 0 = off) and top_p in (0, 1] cut the tail; ids from n_vocab
    on (rows that pad the embedding) are never drawn. generator: a torch.Generator for the batch, or one for each row. Of a prompt
    longer than seq_len the newest seq_len tokens are read. When the context of a row is full, its newest seq_len // 2 tokens
    are read again and sampling goes on from there; with model.eot (documents do not see each other) it starts at the row's
    last end of text. The model must be in evaluation mode.
    """
    seq_len, n_vocab = model.config.seq_len, n_vocab or model.config.vocab_size
    if model.training and model.config.dropout:
        raise ConfigError("sampling with dropout: call model.eval() first")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ConfigError("the prompt is empty: start from the tokenizer's end-of-text id")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be a number, at least 0, not {temperature}")
    if top_k is not None and top_k < 0:
        raise ConfigError(f"top_k must not be negative, not {top_k} (0 or None = off)")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be in (0, 1], not {top_p}")

    def document(row):
        """A row (T,) from its last end of text on."""
        ends = [] if model.eot is None else (row == model.eot).nonzero().flatten().tolist()
        return row[ends[-1]:] if ends else row

    rows, cache = [document(prompt[-seq_len:]) for prompt in prompts], None
    for _ in range(max_new_tokens):
        if cache is None or not use_cache:
            context, cache = left_padded(rows)
            for unread in context.split(CHUNK, dim=1):
                h = model.hidden(unread, cache)
        else:
            h = model.hidden(token[:, None], cache)
        logits = model.lm_head(h[:, -1])[:, :n_vocab]
        if not torch.isfinite(logits).all():
            raise ConfigError(f"non-finite logits at position {cache.length - 1}: the checkpoint is broken")
        token = draw(logits.to(torch.promote_types(logits.dtype, torch.float32)), temperature, top_k, top_p, generator)
        yield token
        rows = [torch.cat((row, t)) for row, t in zip(rows, token.split(1))]
        kept = [document(row) for row in rows]
        kept = [row[-max(1, seq_len // 2):] if len(row) > seq_len else row for row in kept]
        if [*map(len, kept)] != [*map(len, rows)]:
            rows, cache = kept, None


def left_padded(rows):
    """Rows (T_b,) -> their batch (B, T), and a new cache that knows the padding."""
    pad = [max(map(len, rows)) - len(row) for row in rows]
    batch = torch.stack([torch.cat((row.new_zeros(n), row)) for row, n in zip(rows, pad)])
    return batch, KVCache(batch.new_tensor(pad) if any(pad) else None)


def draw(logits, temperature, top_k, top_p, generator):
    """One token per row of logits (B, V) -> (B,). Ties at temperature 0 go to the lowest id."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0         # keep the smallest set that reaches top_p
        p = torch.zeros_like(p).scatter(-1, order, ordered)
    if isinstance(generator, (list, tuple)):
        return torch.cat([torch.multinomial(row, 1, generator=g) for row, g in zip(p, generator, strict=True)])
    return torch.multinomial(p, 1, generator=generator).squeeze(-1)
