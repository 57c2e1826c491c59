"""
The depth read, the one operation that every attention-over-depth pathway is made of.

A read mixes N sources v_0 .. v_{N-1}, each (B, T, C), separately for every token. Channels are cut into H routing heads
of K = C/H; head h has its own softmax over the N sources (MHAR, arXiv 2607.27230, eq. 3; H = 1 is AttnRes,
arXiv 2603.15031, section 3.1):

    z_nh = <query_h, (gain * k_n / rms(k_n))_h>          rms over all C channels, in fp32; no scale, no bias
    w_.h = softmax over n of z_.h
    out_h = sum_n w_nh v_nh                              values are the raw sources

Keys are the values themselves (k_n = v_n), except in DAR (arXiv 2607.18730), where they come from the other stream.

Each rung below computes the same function with one signature, `read(values, query, gain, heads, eps, keys=None)`, and is
tested against the rung before it:

    reference   the specification: stack, normalise, softmax, sum. Keeps every intermediate for autograd.
    lean        the same in plain torch, but keeps only references to the sources and N(H+1) scalars a token.

Letters: B batch, T time, C width, N sources, H routing heads, K = C/H.
"""

import torch


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


def depth_read_lean(values, query, gain, heads, eps, keys=None):
    """Same function and arguments as `depth_read_reference`; a backward of its own makes it keep far less memory."""
    # only the product of query and gain enters the logits; autograd splits its gradient between the two parameters
    return _LeanRead.apply((query * gain).unflatten(-1, (heads, -1)), eps, len(values), *values, *(keys or ()))


class _LeanRead(torch.autograd.Function):
    """
    Backward of a read, from dout alone. With r_n = 1/rms(k_n), qg = query * gain and D_h = sum_n w_nh <dout_h, v_nh>:

        dz_nh = w_nh (<dout_h, v_nh> - D_h)
        dv_n  = w_n dout
        dk_n  = dz_n r_n qg - (sum_h dz_nh z_nh) r_n^2 / C k_n            (added to dv_n where keys are values)
        dqg   = sum over tokens and n of dz_n r_n k_n
    """

    @staticmethod
    def forward(ctx, qg, eps, n, *sources):                                # qg (H, K); sources: n values [, n keys]
        values, keys = sources[:n], sources[-n:]
        dtype = torch.promote_types(values[0].dtype, torch.float32)
        qg = qg.to(dtype)
        r = torch.stack([torch.rsqrt(k.to(dtype).square().mean(-1, keepdim=True) + eps) for k in keys])  # (N, B, T, 1)
        z = r * torch.stack([(heads_of(k, qg).to(dtype) * qg).sum(-1) for k in keys])                    # (N, B, T, H)
        w = z.softmax(0)
        out = w[0, ..., None] * heads_of(values[0], qg)                                                  # (B, T, H, K)
        term = torch.empty_like(out)
        for w_n, v_n in zip(w[1:], values[1:]):
            out += torch.mul(w_n[..., None], heads_of(v_n, qg), out=term)
        ctx.save_for_backward(qg, r, z, *sources)
        ctx.n = n
        return out.flatten(-2).to(values[0].dtype)

    @staticmethod
    def backward(ctx, dout):
        qg, r, z, *sources = ctx.saved_tensors
        n = ctx.n
        values, keys, own_keys = sources[:n], sources[-n:], len(sources) == n
        dout = heads_of(dout, qg).to(qg.dtype)                                                           # (B, T, H, K)
        w = z.softmax(0)
        dz = w * torch.stack([(dout * heads_of(v, qg)).sum(-1) for v in values])
        dz -= w * dz.sum(0)
        radial = (dz * z).sum(-1, keepdim=True) * r.square() / (qg.numel())                              # (N, B, T, 1)
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
        return dqg, None, None, *dvalues, *dkeys


def heads_of(x, qg):
    """(B, T, C) -> (B, T, H, K), cut like qg (H, K)."""
    return x.unflatten(-1, qg.shape)


RUNGS = {"reference": depth_read_reference, "lean": depth_read_lean}


def choose():
    """The name of the fastest rung that runs here."""
    return "lean"
