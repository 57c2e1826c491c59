"""
The depth read, the one operation that every attention-over-depth pathway is made of.

A read mixes N sources v_0 .. v_{N-1}, each (B, T, C), separately for every token. Channels are cut into H routing heads
of K = C/H; head h has its own softmax over the N sources (MHAR, arXiv 2607.27230, eq. 3; H = 1 is AttnRes,
arXiv 2603.15031, section 3.1):

    z_nh = <query_h, (gain * k_n / rms(k_n))_h>          rms over all C channels, in fp32; no scale, no bias
    w_.h = softmax over n of z_.h
    out_h = sum_n w_nh v_nh                              values are the raw sources

Keys are the values themselves (k_n = v_n), except in DAR (arXiv 2607.18730), where they come from the other stream.

Each rung below computes the same function, `read(values, query, gain, heads, eps, keys=None)`, and is tested against the
rung before it:

    reference   the specification: stack, normalise, softmax, sum. Keeps every intermediate for autograd.
    lean        the same in plain torch, but keeps only references to the sources and N(H+1) scalars a token; and reads
                of a group share their pass over the sources that the group starts from (`read_ahead`).

Letters: B batch, T time, C width, N sources, H routing heads, K = C/H, G reads of a group.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable


def depth_weights(keys, query, gain, heads, eps):
    """
    The softmax weights of one read (MHAR eq. 3).

    keys   N tensors (B, T, C), the sources that are scored
    query  (C,) pseudo-query of the site, gain (C,) learned gain of its key norm
    heads  H, must divide C; eps is added to the mean square of a key
    Returns (N, B, T, H), fp32 or wider, summing to 1 over N.
    """
    k = torch.stack(tuple(keys))                                           # (N, B, T, C)
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * gain
    z = (k * query).unflatten(-1, (heads, -1)).sum(-1)                     # (N, B, T, H)
    return z.softmax(0)


def depth_read_reference(values, query, gain, heads, eps, keys=None):
    """
    One depth read (see the top of this file), written to be checked against the paper by eye.

    values N tensors (B, T, C); keys the same, or None for keys = values; the rest as in `depth_weights`
    Returns (B, T, C) in the dtype of the values; the arithmetic is fp32 or wider.
    """
    w = depth_weights(values if keys is None else keys, query, gain, heads, eps)
    v = torch.stack(tuple(values)).unflatten(-1, (heads, -1))              # (N, B, T, H, K)
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
    """
    Backward of a read, from dout alone. With r_n = 1/rms(k_n), qg = query * gain and D_h = sum_n w_nh <dout_h, v_nh>:

        dz_nh = w_nh (<dout_h, v_nh> - D_h)
        dv_n  = w_n dout
        dk_n  = dz_n r_n qg - (sum_h dz_nh z_nh) r_n^2 / C k_n            (added to dv_n where keys are values)
        dqg   = sum over tokens and n of dz_n r_n k_n

    What was read ahead acts as one more value whose logit is the log-sum-exp of its own softmax (AttnRes, algorithm 1).
    """

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
    Phase 1 of AttnRes's algorithm 1: G reads over the same sources in one pass. Queries are parameters, so it can be made
    before the inputs of these reads are known, and it is exact.

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


class Rung(NamedTuple):
    read: Callable
    read_ahead: Callable | None           # None: every read visits all of its sources itself


RUNGS = {"reference": Rung(depth_read_reference, None), "lean": Rung(depth_read_lean, read_ahead_lean)}


def choose():
    """The name of the fastest rung that runs here."""
    return "lean"


def group_size(n_site, sites_per_block):
    """
    How many consecutive reads share one pass over the sources that are there when the first of them is due: a multiple
    of the depth block that divides the sites, near sqrt(n_site), where early passes and late merges balance.
    """
    fit = [g for g in range(sites_per_block, n_site + 1, sites_per_block) if n_site % g == 0] or [sites_per_block]
    return min(fit, key=lambda g: (max(g * g, n_site) / min(g * g, n_site), -g))
