"""
The depth read, the one operation that every attention-over-depth pathway is made of, and the histories that are read.

A read mixes N sources v_0 .. v_{N-1}, each (B, T, C), separately for every token. Channels are cut into H routing heads
of K = C/H; head h has its own softmax over the N sources (MHAR, arXiv 2607.27230, eq. 3; H = 1 is AttnRes,
arXiv 2603.15031, section 3.1):

    z_nh = <query_h, (gain * k_n / rms(k_n))_h>          rms over all C channels, in fp32; no scale, no bias
    w_.h = softmax over n of z_.h
    out_h = sum_n w_nh v_nh                              values are the raw sources

Keys are the values themselves (k_n = v_n), except in DAR (arXiv 2607.18730), where they come from the other stream.

Three rungs compute this function, each tested against the one before it:

    reference   the specification: stack, normalise, softmax, sum. Keeps every intermediate for autograd.
    lean        the same in plain torch, but keeps only references to the sources and a few scalars a token.
    triton      kernels for GPUs, `_forward` and `_backward`. Keeps the sources and the log-sum-exp of each read.

**Groups.** Queries are parameters, so what a read finds in sources that exist already can be computed before its own turn.
lean and triton let up to GROUP consecutive reads share one pass over the sources that the first of them sees, the history of the
group; each read then merges the few sources written since (AttnRes, algorithm 1). This is exact: a softmax over a union
follows from the softmax over each part and its log-sum-exp.

**Backward.** With dout given, r_n = 1/rms(k_n), qg = query * gain, and D_h = <dout_h, out_h> = sum_n w_nh <dout_h, v_nh>:

    dz_nh = w_nh (<dout_h, v_nh> - D_h)
    dv_n  = w_n dout
    dk_n  = dz_n r_n qg - (sum_h dz_nh z_nh) r_n^2 / C k_n            (added to dv_n where keys are values)
    dqg   = sum over tokens and n of dz_n r_n k_n

so a source is read once, weights are made again from the log-sum-exp, and nothing of size N x C is kept. When backward
comes to a read, all later reads have had their turn; the gradient of the newest source, which no earlier read saw, is then
complete but for the reads of its own group and leaves at once. Only sums over whole groups wait in an fp32 bank.

**Traffic of the triton rung**, bytes a channel and token. A source of 2 bytes is read once a group and once by each later
read of its own group; in backward likewise, and each group reads and writes 8 bytes of the bank for each source of its
history. `bench.py bytes` counts them and prints the model of the best known scheme beside them.

Letters: B batch, T time, P = B T tokens, C width, N sources, H routing heads, K = C/H, G reads of a group, R = 2L+1 reads,
S streams (DAR has two histories, the others one).
"""

from __future__ import annotations                                         # macOS has no triton: tl is not evaluated

import os
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def depth_weights(keys, query, gain, heads, eps):
    """
    The softmax weights of one read (MHAR eq. 3).

    keys   N tensors (B, T, C), or one (N, B, T, C): the sources that are scored
    query  (C,) pseudo-query of the site, gain (C,) learned gain of its key norm
    heads  H, must divide C; eps is added to the mean square of a key
    Returns (N, B, T, H), fp32 or wider, summing to 1 over N.
    """
    k = keys if torch.is_tensor(keys) else torch.stack(tuple(keys))        # (N, B, T, C)
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * gain
    z = (k * query).unflatten(-1, (heads, -1)).sum(-1)                     # (N, B, T, H)
    return z.softmax(0)


def depth_read_reference(values, query, gain, heads, eps, keys=None):
    """
    One depth read (see the top of this file), written to be checked against the paper by eye.

    values N tensors (B, T, C), or one; keys the same, or None for keys = values; the rest as in `depth_weights`
    Returns (B, T, C) in the dtype of the values; the arithmetic is fp32 or wider.
    """
    w = depth_weights(values if keys is None else keys, query, gain, heads, eps)
    v = values if torch.is_tensor(values) else torch.stack(tuple(values))
    v = v.unflatten(-1, (heads, -1))                                       # (N, B, T, H, K)
    return (w.unsqueeze(-1) * v).sum(0).flatten(-2).to(v.dtype)


def depth_read_lean(values, query, gain, heads, eps, keys=None, ahead=None):
    """
    Same function and arguments as `depth_read_reference`; a backward of its own makes it keep far less memory. `ahead` has
    what `read_ahead_lean` found for this read in the first of the sources: those are not visited again.
    """
    out, lse, n_read = ahead or Ahead(None, None, 0)
    late, late_keys = values[n_read:], keys[n_read:] if keys else ()
    if not late:
        return out.to(values[0].dtype)
    return _LeanRead.apply(query_gain(query, gain, heads), eps, len(late), out, lse, *late, *late_keys)


class Ahead(NamedTuple):
    """What a read finds in the first n of its sources alone."""
    out: torch.Tensor                     # (B, T, C), fp32 or wider
    lse: torch.Tensor                     # (B, T, H), log-sum-exp of the logits
    n: int


class _LeanRead(torch.autograd.Function):
    """What was read ahead acts as one more value whose logit is the log-sum-exp of its own softmax."""

    @staticmethod
    def forward(ctx, qg, eps, n, ahead, lse, *sources):                    # qg (H, K); sources: n values [, n keys]
        values, keys = sources[:n], sources[-n:]
        dtype = torch.promote_types(values[0].dtype, torch.float32)
        qg = qg.to(dtype)
        r = torch.stack([torch.rsqrt(k.to(dtype).square().mean(-1, keepdim=True) + eps) for k in keys])  # (N, B, T, 1)
        z = r * torch.stack([(heads_of(k, qg).to(dtype) * qg).sum(-1) for k in keys])                    # (N, B, T, H)
        if ahead is not None:
            values, z = (ahead, *values), torch.cat((lse.unsqueeze(0), z))                               # (1 + N, B, T, H)
        w = z.softmax(0)
        out = w[0, ..., None] * heads_of(values[0], qg)                                                  # (B, T, H, K)
        term = torch.empty_like(out)
        for w_n, v_n in zip(w[1:], values[1:]):
            out += torch.mul(w_n[..., None], heads_of(v_n, qg), out=term)
        ctx.save_for_backward(qg, r, z, ahead, *sources)
        ctx.n = n
        return out.flatten(-2).to(sources[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        qg, r, z, ahead, *sources = ctx.saved_tensors
        n = ctx.n
        values, keys, own_keys = sources[:n], sources[-n:], len(sources) == n
        dout = heads_of(dout, qg).to(qg.dtype)                                                           # (B, T, H, K)
        w = z.softmax(0)
        dz = w * torch.stack([(dout * heads_of(v, qg)).sum(-1) for v in ([] if ahead is None else [ahead]) + values])
        dz -= w * dz.sum(0)
        dahead = dlse = None
        if ahead is not None:
            dahead, dlse = (w[0, ..., None] * dout).flatten(-2), dz[0]
            w, z, dz = w[1:], z[1:], dz[1:]
        radial = (dz * z).sum(-1, keepdim=True) * r.square() / qg.numel()                                # (N, B, T, 1)
        s = dz * r                                                         # gradient of <qg_h, k_nh>, (N, B, T, H)
        cross, dvalues, dkeys = 0, [], []
        for i, (v, k) in enumerate(zip(values, keys)):
            cross = cross + s[i].flatten(0, -2).mT @ k.flatten(0, -2).to(qg.dtype)                       # (H, C)
            dv = (w[i, ..., None] * dout).flatten(-2)
            dk = (s[i, ..., None] * qg).flatten(-2).sub_(radial[i] * k)
            if own_keys:
                dvalues.append(dv.add_(dk).to(v.dtype))
            else:
                dvalues.append(dv.to(v.dtype))
                dkeys.append(dk.to(k.dtype))
        # head h of dqg pairs s_h with slice h of the keys; one thin matmul over all pairs is faster than H small ones
        dqg = heads_of(cross, qg).diagonal().mT                                                          # (H, K)
        return dqg, None, None, dahead, dlse, *dvalues, *dkeys


def read_ahead_lean(values, queries, gains, heads, eps, keys=None):
    """
    Phase 1 of AttnRes's algorithm 1: G reads over the same sources in one pass.

    values, keys, heads, eps as in `depth_read_reference`; queries and gains (G, C)
    Returns the `Ahead` of each read; `depth_read_lean` merges it with later sources.
    """
    found = _LeanAhead.apply(query_gain(queries, gains, heads), eps, len(values), *values, *(keys or ()))
    return [Ahead(out, lse, len(values)) for out, lse in zip(found[:len(queries)], found[len(queries):])]


class _LeanAhead(torch.autograd.Function):
    """
    The equations of `_LeanRead` for G reads at once, as matrix products over a stack of the sources that is made for the
    moment, in forward and again in backward. The gradient of a log-sum-exp adds to dz: dz_n = w_n (<dout, v_n> - D + dlse).
    """

    @staticmethod
    def forward(ctx, qg, eps, n, *sources):                                # qg (G, H, K); sources: n values [, n keys]
        G, H, K = qg.shape
        dtype = torch.promote_types(sources[0].dtype, torch.float32)
        v, k = stacked(sources[:n], dtype), stacked(sources[-n:], dtype)   # (N, P, C) for P = B T tokens
        r = torch.rsqrt(k.square().mean(-1, keepdim=True) + eps)           # (N, P, 1)
        z = (r * (k @ block_diagonal(qg.to(dtype)))).unflatten(-1, (H, G)) # (N, P, H, G)
        lse = z.logsumexp(0)
        out = torch.einsum("nphg,nphk->gphk", (z - lse).exp_(), v.unflatten(-1, (H, K))).contiguous()
        ctx.save_for_backward(qg, r, z, *sources)
        ctx.n = n
        shape = sources[0].shape
        return *out.view(G, *shape).unbind(), *lse.view(*shape[:-1], H, G).unbind(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        qg, r, z, *sources = ctx.saved_tensors
        n, (G, H, K), dtype = ctx.n, qg.shape, z.dtype
        v, k, own_keys = stacked(sources[:n], dtype), stacked(sources[-n:], dtype), len(sources) == n
        dout = torch.stack(grads[:G]).view(G, -1, H, K)
        dlse = torch.stack(grads[G:], dim=-1).view(-1, H, G)
        w = z.softmax(0)
        dz = torch.einsum("gphk,nphk->nphg", dout, v.unflatten(-1, (H, K)))
        dz = w * (dz - (w * dz).sum(0) + dlse)
        radial = (dz * z).sum((-1, -2)).unsqueeze(-1) * r.square() / (H * K)
        s = (r * dz.flatten(-2)).flatten(0, 1)                             # gradient of <qg_h, k_nh>, (N P, H G)
        dv = torch.einsum("nphg,gphk->nphk", w, dout).reshape(v.shape)
        dk = (s @ block_diagonal(qg.to(dtype)).mT).view_as(k).sub_(radial * k)
        dqg = (s.mT @ k.flatten(0, 1)).view(H, G, H, K).diagonal(dim1=0, dim2=2).permute(0, 2, 1)         # (G, H, K)
        dsources = [dv.add_(dk)] if own_keys else [dv, dk]
        return dqg.to(qg.dtype), None, None, *(d.view_as(x).to(x.dtype) for ds in dsources for d, x in zip(ds, sources))


def query_gain(query, gain, heads):
    """(..., C), (..., C) -> (..., H, K), fp32 or wider. Only the product of query and gain enters the logits; autograd splits
    its gradient between the two parameters."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return (query.to(wide) * gain.to(wide)).unflatten(-1, (heads, -1))


def stacked(sources, dtype):
    """N tensors (B, T, C) -> (N, B T, C)."""
    return torch.stack(sources).flatten(1, -2).to(dtype)


def block_diagonal(qg):
    """(G, H, K) -> (C, H G): column (h, g) holds qg_gh in the channels of head h, so that keys @ it gives all logits."""
    G, H, K = qg.shape
    full = qg.new_zeros(H, K, H, G)
    full.diagonal(dim1=0, dim2=2).copy_(qg.permute(2, 0, 1))
    return full.view(H * K, H * G)


def heads_of(x, qg):
    """(B, T, C) -> (B, T, H, K), cut like qg (H, K)."""
    return x.unflatten(-1, qg.shape)


# ----------------------------------------------------------------------------------------------------------------------
# triton: one program takes some tokens in turn. A tile holds E = reads x streams rows of C channels, cut into H heads of K.
# Tiles are powers of two: K = KA + KB (160 = 128 + 32), and every (..., C) value comes as a pair of tiles, `_a` and `_b`.
# KEYS and VALUES are bit masks: bit j is set if the read of stream j takes its keys or values from stream 1.

GROUP = 8
launched = Counter()                      # kernel name -> launches: tells whether the fast path ran


def jit(f):
    counts = ["tokens", "first", "stop", "step", "row", "count", "n_read", "group"]                # differ from read to read
    return f if triton is None else triton.jit(f, do_not_specialize=[name for name in counts if name in f.__annotations__])


def helper(f):
    return f if triton is None else triton.jit(f)


@helper
def _channels(H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr):
    """Of a source (H, K): where its two tiles lie, and masks of what is there."""
    h, a, b = tl.arange(0, HP)[:, None], tl.arange(0, KA)[None, :], KA + tl.arange(0, KB)[None, :]
    return h * K + a, h * K + b, (h < H) & (a < K), (h < H) & (b < K)


@helper
def _rows(count, ia, ib, ma, mb, KEYS: tl.constexpr, VALUES: tl.constexpr, S: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
          HP: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, E: tl.constexpr, VEC: tl.constexpr):
    """Of rows e = read * S + stream: which take keys, values from stream 1; masks (E, H) of all and of the first read's; masks
    and places of the two tiles (E, H, K), places of (E, H)."""
    e, h = tl.arange(0, E)[:, None], tl.arange(0, HP)[None, :]
    live = e < count * S
    # all tiles get one layout, or they would be exchanged through shared memory for every source
    ea = tl.max_contiguous(e[:, :, None] * C + ia[None], [1, 1, VEC])
    eb = tl.max_contiguous(e[:, :, None] * C + ib[None], [1, 1, max(1, VEC * KB // KA)])
    return ((KEYS >> (e % S)) % 2 == 1, (VALUES >> (e % S)) % 2 == 1, live & (h < H), (e < S) & (h < H),
            live[:, :, None] & ma[None], live[:, :, None] & mb[None], ea, eb, e * H + h)


@helper
def _load(at, ia, ib, ma, mb):
    return tl.load(at + ia, mask=ma, other=0.0).to(tl.float32), tl.load(at + ib, mask=mb, other=0.0).to(tl.float32)


@helper
def _store(at, ia, ib, ma, mb, xa, xb):
    tl.store(at + ia, xa.to(at.dtype.element_ty), mask=ma)
    tl.store(at + ib, xb.to(at.dtype.element_ty), mask=mb)


@helper
def _source(at, ia, ib, ma, mb, eps, C: tl.constexpr, S: tl.constexpr):
    """The streams of one source and 1/rms of each; one stream is given twice."""
    x0a, x0b = _load(at, ia, ib, ma, mb)
    r0 = tl.rsqrt((tl.sum(x0a * x0a) + tl.sum(x0b * x0b)) / C + eps)
    if S == 1:
        return x0a, x0b, r0, x0a, x0b, r0
    else:
        x1a, x1b = _load(at + C, ia, ib, ma, mb)
        r1 = tl.rsqrt((tl.sum(x1a * x1a) + tl.sum(x1b * x1b)) / C + eps)
        return x0a, x0b, r0, x1a, x1b, r1


@helper
def _dots(ta, tb, x0a, x0b, x1a, x1b, of1, S: tl.constexpr):
    """Per head, <row e of a tile, its stream of the source>: (E, H)."""
    d = tl.sum(ta * x0a[None], -1) + tl.sum(tb * x0b[None], -1)
    if S == 2:
        d = tl.where(of1, tl.sum(ta * x1a[None], -1) + tl.sum(tb * x1b[None], -1), d)
    return d


@helper
def _add(tile, w, x0, x1, of1, S: tl.constexpr):
    """tile + w (E, H) times the stream of the source that belongs to each row."""
    if S == 1:
        return tile + w[:, :, None] * x0[None]
    else:
        return tile + tl.where(of1, 0.0, w)[:, :, None] * x0[None] + tl.where(of1, w, 0.0)[:, :, None] * x1[None]


@jit
def _forward(bank, qg, out, partial, lse, P, tokens: int, first: int, stop: int, step: int, row: int, count: int, n_read: int,
             group: int, eps, MERGE: tl.constexpr, OPEN: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
             S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
             E: tl.constexpr, VEC: tl.constexpr):
    """
    `count` reads of rows first*step, (first+1)*step, .. below stop*step of the bank and, by the first of them alone, of the
    open block in row `row` (OPEN). The first read's mix goes to `out`; those of the others to `partial`, to be gone on with
    later (MERGE). bank (R, P, S, C), qg (R, S, C), out (P, S, C), partial (P, G, S, C), lse (P, R, S, H); qg, partial and
    lse from the first read on.
    """
    C: tl.constexpr = H * K
    ia, ib, ma, mb = _channels(H, K, HP, KA, KB)
    by1, of1, live, one, la, lb, ea, eb, eh = _rows(count, ia, ib, ma, mb, KEYS, VALUES, S, H, C, HP, KA, KB, E, VEC)
    is_first = tl.arange(0, E)[:, None, None] < S
    qa, qb = _load(qg, ea, eb, la, lb)
    for t in range(tokens):
        p = (tl.program_id(0) * tokens + t).to(tl.int64)
        if p < P:
            if MERGE:
                top, total = tl.load(lse + p * n_read * S * H + eh, mask=live, other=0.0), tl.full((E, HP), 1.0, tl.float32)
                ya, yb = _load(partial + p * group * S * C, ea, eb, la, lb)
            else:
                top, total = tl.full((E, HP), float("-inf"), tl.float32), tl.zeros((E, HP), tl.float32)
                ya, yb = tl.zeros((E, HP, KA), tl.float32), tl.zeros((E, HP, KB), tl.float32)
            for n in range(first, stop + OPEN):                            # softmax on the fly, as in FlashAttention
                source = tl.where(n < stop, n * step, row).to(tl.int64)
                x0a, x0b, r0, x1a, x1b, r1 = _source(bank + (source * P + p) * S * C, ia, ib, ma, mb, eps, C, S)
                z = _dots(qa, qb, x0a, x0b, x1a, x1b, by1, S) * tl.where(by1, r1, r0)
                if OPEN:
                    z = tl.where((n < stop) | one, z, float("-inf"))
                new_top = tl.maximum(top, z)
                keep, w = tl.exp(top - new_top), tl.exp(z - new_top)
                top, total = new_top, total * keep + w
                ya = _add(ya * keep[:, :, None], w, x0a, x1a, of1, S)
                yb = _add(yb * keep[:, :, None], w, x0b, x1b, of1, S)
            ya, yb = ya / total[:, :, None], yb / total[:, :, None]
            _store(out + p * S * C, ea, eb, la & is_first, lb & is_first, ya, yb)
            if E > S:
                _store(partial + p * group * S * C, ea, eb, la & (is_first == 0), lb & (is_first == 0), ya, yb)
            tl.store(lse + p * n_read * S * H + eh, top + tl.log(total), mask=live)


@jit
def _take(cotangent, out, dout, delta, P, tokens: int, group: int, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
          HP: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr):
    """The cotangent (P, C) of a mix goes into the buffer of its group, with D. Of out (P, S, C), dout (P, G, S, C) and
    delta (P, G, S, H) one stream."""
    ia, ib, ma, mb = _channels(H, K, HP, KA, KB)
    h = tl.arange(0, HP)
    for t in range(tokens):
        p = (tl.program_id(0) * tokens + t).to(tl.int64)
        if p < P:
            da, db = _load(cotangent + p * H * K, ia, ib, ma, mb)
            ya, yb = _load(out + p * S * H * K, ia, ib, ma, mb)
            _store(dout + p * group * S * H * K, ia, ib, ma, mb, da, db)
            tl.store(delta + p * group * S * H + h, tl.sum(da * ya, -1) + tl.sum(db * yb, -1), mask=h < H)


@helper
def _gradient(xa, xb, r, w, s, dz_z, da, db, qa, qb, of, by, C: tl.constexpr):
    """Of one stream of a source: what all reads of the tile that take values (of) or keys (by) from it add."""
    w, s = tl.where(of, w, 0.0)[:, :, None], tl.where(by, s, 0.0)[:, :, None]
    radial = tl.sum(tl.where(by, dz_z, 0.0)) * r * r / C
    return tl.sum(w * da + s * qa, 0) - radial * xa, tl.sum(w * db + s * qb, 0) - radial * xb


@jit
def _backward(bank, qg, lse, dout, delta, dbank, dnew, dqg, P, tokens: int, first: int, stop: int, step: int, row: int,
              count: int, n_read: int, group: int, eps, ADD: tl.constexpr, OPEN: tl.constexpr, KEYS: tl.constexpr,
              VALUES: tl.constexpr, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KA: tl.constexpr,
              KB: tl.constexpr, E: tl.constexpr, VEC: tl.constexpr):
    """
    What the first read of the tile and the `count` - 1 later ones of its group add to the gradients of the rows that
    `_forward` names: to `dnew` (P, S, C) for the newest one, in row `row`, whose gradient is complete with it; to `dbank`
    (.., P, S, C), a row a closed source, for the others. ADD: later groups left gradients of closed sources in dbank.
    dout (P, G, S, C) and delta (P, G, S, H), which is D, from the first read on. dqg (programs, R, S, C) collects the
    gradient of qg program by program.
    """
    C: tl.constexpr = H * K
    ia, ib, ma, mb = _channels(H, K, HP, KA, KB)
    by1, of1, live, one, la, lb, ea, eb, eh = _rows(count, ia, ib, ma, mb, KEYS, VALUES, S, H, C, HP, KA, KB, E, VEC)
    qa, qb = _load(qg, ea, eb, la, lb)
    dqg += tl.program_id(0).to(tl.int64) * n_read * S * C
    dqa, dqb = _load(dqg, ea, eb, la, lb)
    for t in range(tokens):
        p = (tl.program_id(0) * tokens + t).to(tl.int64)
        if p < P:
            da, db = _load(dout + p * group * S * C, ea, eb, la, lb)
            D = tl.load(delta + p * group * S * H + eh, mask=live, other=0.0)
            total = tl.load(lse + p * n_read * S * H + eh, mask=live, other=float("inf"))
            for n in range(first, stop + OPEN):
                source = tl.where(n < stop, n * step, row).to(tl.int64)
                x0a, x0b, r0, x1a, x1b, r1 = _source(bank + (source * P + p) * S * C, ia, ib, ma, mb, eps, C, S)
                r = tl.where(by1, r1, r0)
                z = _dots(qa, qb, x0a, x0b, x1a, x1b, by1, S) * r
                w = tl.exp(z - total)
                if OPEN:
                    w = tl.where((n < stop) | one, w, 0.0)
                dz = w * (_dots(da, db, x0a, x0b, x1a, x1b, of1, S) - D)
                dqa, dqb = _add(dqa, dz * r, x0a, x1a, by1, S), _add(dqb, dz * r, x0b, x1b, by1, S)
                for j in tl.static_range(S):
                    if j == 0:
                        ga, gb = _gradient(x0a, x0b, r0, w, dz * r, dz * z, da, db, qa, qb, of1 == 0, by1 == 0, C)
                    else:
                        ga, gb = _gradient(x1a, x1b, r1, w, dz * r, dz * z, da, db, qa, qb, of1, by1, C)
                    at = dbank + ((tl.where(n < stop, n, 0).to(tl.int64) * P + p) * S + j) * C
                    if ADD:
                        pa, pb = _load(at, ia, ib, ma & (n < stop) if OPEN else ma, mb & (n < stop) if OPEN else mb)
                        ga, gb = ga + pa, gb + pb
                    if source == row:
                        _store(dnew + (p * S + j) * C, ia, ib, ma, mb, ga, gb)
                    else:
                        _store(at, ia, ib, ma, mb, ga, gb)
    _store(dqg, ea, eb, la, lb, dqa, dqb)


# ----------------------------------------------------------------------------------------------------------------------
# histories: the sources of one forward pass, and every read of them


class History:
    """
    query            (R, S, C) pseudo-queries; gain (R, C) gains of the key norm, shared by the streams
    heads, eps       as in `depth_weights`
    key_stream       which stream of the sources gives the keys of the read of stream j, for each j; value_stream likewise
    sites_per_block  after how many sites a source is appended

    Read in the order of the sites, 0 .. R-1.
    """

    def __init__(self, rung, query, gain, heads, eps, key_stream=(0,), value_stream=(0,), sites_per_block=1):
        self.rung, self.query, self.gain, self.settings = rung, query, gain, (heads, eps)
        self.roles = list(zip(key_stream, value_stream))
        self.closed, self.ahead = [], {}

    def append(self, source):
        """Add a source: one tensor (B, T, C) a stream."""
        self.closed.append(source)

    def read(self, site, open_block=None):
        """The mix of all sources, and of the open block as it stands, for each stream (B, T, C)."""
        sources = self.closed + [open_block] * (open_block is not None)
        if len(sources) == 1:                                              # softmax over one source
            return sources[0]
        if self.rung.read_ahead is not None and (site - 1) % GROUP == 0 and len(self.closed) > 1:
            self.ahead = self.read_ahead(slice(site, min(site + GROUP, len(self.query))))
        return tuple(self.rung.read([x[value] for x in sources], self.query[site, j], self.gain[site], *self.settings,
                                    None if key == value else [x[key] for x in sources], **self.ahead.get((site, j), {}))
                     for j, (key, value) in enumerate(self.roles))

    def read_ahead(self, reads):
        """{(read, stream): what it finds in the sources that are there}."""
        found = {}
        for j, (key, value) in enumerate(self.roles):
            values, keys = ([x[stream] for x in self.closed] for stream in (value, key))
            ahead = self.rung.read_ahead(values, self.query[reads, j], self.gain[reads], *self.settings,
                                         None if key == value else keys)
            found |= {(reads.start + i, j): {"ahead": a} for i, a in enumerate(ahead)}
        return found

    def weights(self, site, open_block=None):
        """The depth weights of the reads of a site, (S, N, B, T, H)."""
        sources = self.closed + [open_block] * (open_block is not None)
        return torch.stack([depth_weights([x[key] for x in sources], self.query[site, j], self.gain[site], *self.settings)
                            for j, (key, _) in enumerate(self.roles)])


class TokenHistory:
    """
    `History` for a few tokens at a time and no backward, as in sampling, where the number of operations is what counts: a
    source is normalised when it is written, and a read is one call of torch's attention. With m the norm of a key,
    <query, gain * key> / sqrt(m^2 / C + eps) = <sqrt(C) query * gain, key / hypot(m, sqrt(C eps))>.
    """

    def __init__(self, rung, query, gain, heads, eps, key_stream=(0,), value_stream=(0,), sites_per_block=1):
        self.R, self.S, self.C = query.shape
        self.qg = query_gain(query, gain[:, None], heads) * self.C ** 0.5              # (R, S, H, K)
        self.floor = self.qg.new_full((), (self.C * eps) ** 0.5)
        self.roles = [None if streams == tuple(range(self.S)) else list(streams) for streams in (key_stream, value_stream)]
        self.closed, self.keys = [], None

    def append(self, source):
        self.put(source)
        self.closed.append(source)

    def put(self, source):
        """Write a source, one tensor (B, T, C) a stream, behind the closed ones."""
        n, x = len(self.closed), torch.stack(source) if self.S > 1 else source[0]
        if self.keys is None:
            _, S, H, K = self.qg.shape
            self.shape, self.dtype, P = source[0].shape, x.dtype, source[0].numel() // self.C
            self.qg = self.qg.unsqueeze(2).expand(-1, S, P, H, K).reshape(-1, S * P, H, 1, K)
            self.keys, self.values = self.qg.new_empty(2, S * P, H, self.R + 1, K)     # at most R sources and an open block
        k, v = (x if order is None else x[order] for order in self.roles)
        norm = torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=self.qg.dtype).hypot(self.floor)
        rows = self.keys[:, :, n], self.values[:, :, n]                                # (S P, H, K)
        torch.div(k.view(rows[0].shape), norm.view(-1, 1, 1), out=rows[0])
        rows[1].copy_(v.view(rows[1].shape))

    def read(self, site, open_block=None):
        if open_block is not None:
            self.put(open_block)
        n = len(self.closed) + (open_block is not None)
        out = F.scaled_dot_product_attention(self.qg[site], self.keys[:, :, :n], self.values[:, :, :n], scale=1.0)
        return out.view(self.S, *self.shape).to(self.dtype).unbind()


class TritonHistory:
    """
    `History` with the kernels. Sources live in one bank; row s is what was written last when site s reads, closed or open.
    Backward must come once, to all reads, in reverse order; it does whenever a loss of the model's output is
    differentiated, and anything else is refused.
    """

    def __init__(self, rung, query, gain, heads, eps, key_stream=(0,), value_stream=(0,), sites_per_block=1):
        self.qg = query_gain(query, gain[:, None].expand_as(query), heads).flatten(-2)                     # (R, S, C)
        self.R, self.S, self.C = self.qg.shape
        self.H, self.eps, self.step = heads, eps, sites_per_block
        self.rows, self.warps, tile = tile_of(self.C, heads, self.S)
        self.group = self.rows // self.S
        masks = {name: sum(bit << j for j, bit in enumerate(streams)) for name, streams in
                 (("KEYS", key_stream), ("VALUES", value_stream))}
        self.tile = masks | {"S": self.S, "H": heads} | tile
        self.newest, self.due, self.due_backward = None, 0, self.R - 1

    def append(self, source):
        self.newest = source

    def read(self, site, open_block=None):
        if site != self.due:
            raise RuntimeError(f"kernels=triton: read {site} came when read {self.due} was due; use --kernels=lean to read in "
                               "any order")
        self.due += 1
        newest, self.newest = open_block or self.newest, None              # kept, it would hold the graph that holds this
        if site == 0:
            self.shape = newest[0].shape
            self.P = newest[0].numel() // self.C
            self.bank = newest[0].new_empty(self.R, self.P, self.S, self.C)
            self.lse = self.bank.new_empty(self.P, self.R, self.S, self.H, dtype=torch.float32)
            self.tokens = tokens_of_program(self.P)
        for j, y in enumerate(newest):                                     # outside of autograd, like all that follows
            self.bank[site, :, j].view(self.shape).copy_(y.detach())
        return _TritonRead.apply(self, site, self.qg if site == 0 else None, *newest)

    def free(self):
        """Let go of the buffers: a loss that somebody still holds holds the graph, and so this."""
        self.bank = self.lse = self.partial = self.dbank = self.dqg = self.dout = self.delta = None

    def span(self, site):
        """(first read of the group of `site`, the first read after the group)."""
        start = site - (site - 1) % self.group
        return start, min(start + self.group, self.R)

    def constants(self, kernel, count):
        """What `kernel` is compiled for when it takes `count` reads at once."""
        rows = self.S << (count - 1).bit_length()
        few = rows * self.C * self.S <= (2048 if kernel is _backward else 8192)
        warps = max(1, self.warps // 2) if few else self.warps             # so that a thread loads 16 bytes of a source
        each = self.tile["HP"] * self.tile["KA"] // (32 * warps)           # elements of a source a thread
        return self.tile | {"E": rows, "VEC": min(8, self.tile["KA"], max(1, each)), "num_warps": warps}

    def launch(self, kernel, tensors, tokens, *numbers, **constants):
        with torch.cuda.device_of(self.bank):
            kernel[-(-self.P // tokens),](*tensors, self.P, tokens, *numbers, **constants)
        launched[kernel.__name__] += 1

    def launch_reads(self, kernel, site, count, first, tensors, **flags):
        tokens = 8 if kernel is _forward and count == 1 else self.tokens   # small programs, many of which fill a GPU
        self.launch(kernel, (self.bank, self.qg[site], *tensors), tokens, first, site // self.step + 1, self.step, site, count,
                    self.R, self.group, self.eps, **flags, OPEN=int(site % self.step > 0), **self.constants(kernel, count))

    def forward(self, site):
        start, stop = self.span(site)
        i, out = site - start, self.bank.new_empty(self.P, self.S, self.C)
        if i == 0:
            self.partial = self.lse.new_empty(self.P, self.group, self.S, self.C)
        first = 0 if i == 0 else start // self.step + 1
        self.launch_reads(_forward, site, 1 if i else stop - site, first, (out, self.partial[:, i], self.lse[:, site]), MERGE=i > 0)
        if site == self.R - 1:
            self.partial = None
        return out

    def backward(self, site, out, douts):
        start, stop = self.span(site)
        i = site - start
        if stop == self.R == site + 1:
            self.dbank = self.lse.new_empty(self.R // self.step + 1, self.P, self.S, self.C)
            self.dqg = self.lse.new_zeros(-(-self.P // self.tokens), self.R, self.S, self.C)
        if stop == site + 1:
            self.dout = self.bank.new_empty(self.P, self.group, self.S, self.C)
            self.delta = self.lse.new_empty(self.P, self.group, self.S, self.H)
        sizes = {name: size for name, size in self.constants(_forward, 1).items() if name not in ("KEYS", "VALUES", "E", "VEC")}
        for j, d in enumerate(douts):
            self.launch(_take, (d.contiguous(), out[:, j], self.dout[:, i, j], self.delta[:, i, j]), 8, self.group, **sizes)
        dnew, is_open = torch.empty_like(out), site % self.step > 0
        first = 0 if i == 0 else site // self.step + is_open                # inside a group, the newest source alone
        self.launch_reads(_backward, site, stop - site, first, (
            self.lse[:, site], self.dout[:, i], self.delta[:, i], self.dbank, dnew, self.dqg[:, site]), ADD=stop < self.R)
        return dnew


class _TritonRead(torch.autograd.Function):
    """One read as a function of the newest source; those before it are in the bank. Read 0, the first forward and the last
    backward, also stands for qg."""

    @staticmethod
    def forward(ctx, history, site, qg, *newest):
        ctx.history, ctx.site = history, site
        if site == 0:
            return tuple(x.view_as(x) for x in newest)
        out = history.forward(site)
        ctx.save_for_backward(out)
        return tuple(h.view(history.shape) for h in out.unbind(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts):
        history, site = ctx.history, ctx.site
        if site != history.due_backward:
            raise RuntimeError(f"kernels=triton: backward of read {site} came when that of read {history.due_backward} was due; "
                               "a forward pass can be differentiated once, from the model's output; use --kernels=lean for "
                               "anything else")
        history.due_backward -= 1
        if site == 0:
            dx = [(d + history.dbank[0, :, j].view(d.shape)).to(d.dtype) for j, d in enumerate(douts)]
            dqg = history.dqg.sum(0)
            history.free()
            return None, None, dqg, *dx
        dnew = history.backward(site, *ctx.saved_tensors, douts)
        return None, None, None, *(d.view(history.shape) for d in dnew.unbind(1))


def tokens_of_program(P):
    """Of P: enough that sums over a program's tokens are cheap to write, few enough to fill a GPU with programs."""
    return max(16, -(-P // 256))


def tile_of(C, H, S):
    """
    (rows of a tile, warps of `_backward`, sizes). Rows are reads x streams: as many as fit the registers, of which backward
    fills three tiles. The limits are where the compiler spills for sm_80, sm_90 and sm_100.
    """
    fit = (10_240 if S == 1 else 8192) // C
    rows = max(S, min(GROUP if H < 16 else GROUP // 2, 1 << fit.bit_length() >> 1))
    K = C // H
    KA = 1 << K.bit_length() >> 1
    return rows, min(16, triton.next_power_of_2(-(-GROUP * C // 1280))), {
        "K": K, "HP": triton.next_power_of_2(H), "KA": KA, "KB": triton.next_power_of_2(max(1, K - KA))}


class Rung(NamedTuple):
    history: type
    read: Callable | None = None          # one read on its own
    read_ahead: Callable | None = None    # None: every read visits all of its sources itself


RUNGS = {"reference": Rung(History, depth_read_reference), "lean": Rung(History, depth_read_lean, read_ahead_lean),
         "triton": Rung(TritonHistory)}
SAMPLING = Rung(TokenHistory)             # which sampling takes for single tokens, whatever the rung of the model


def choose(name, device, dtype):
    """
    The name of a rung for a kind of device ("cuda", "cpu", ..) and dtype of activations: "auto" gives the fastest one that
    runs there; for another name ValueError says why it does not.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    why_not = ("triton is not installed (it exists for Linux)" if triton is None else
               f"the kernels need a GPU of CUDA, not {device}" if device != "cuda" and not interpreted else
               f"the kernels know float32, bfloat16 and float16, not {dtype}" if dtype == torch.float64 else None)
    if name == "auto":
        return "lean" if why_not or device != "cuda" else "triton"
    if name == "triton" and why_not:
        raise ValueError(f"kernels=triton: {why_not}; use --kernels=lean")
    return name
