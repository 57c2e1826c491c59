"""
The pathways once more, written from the papers' equations as plain loops and sharing no code with model.py.

Each function takes the embedding x (B, T, C), the list of sublayers (callables (B, T, C) -> (B, T, C)), and p, the raw
parameters by name; it returns what the final norm sees. `block` is the number of sites in a depth block.
"""

import torch


def rms_normed(k, eps):
    return k / torch.sqrt((k * k).mean(-1, keepdim=True) + eps)


def depth_attention(values, keys, query, gain, heads, eps):
    """MHAR eq. 3: logit_ih = q_h . (gain * RMSNorm(k_i))_[h]; softmax over i; mix_[h] = sum_i a_ih v_i[h]."""
    width = query.numel() // heads
    mixed = []
    for h in range(heads):
        inside = slice(h * width, (h + 1) * width)
        scores = []
        for k in keys:
            key = rms_normed(k, eps) * gain
            scores.append(torch.exp((key[..., inside] * query[inside]).sum(-1, keepdim=True)))
        total = sum(scores)
        mixed.append(sum(score / total * v[..., inside] for score, v in zip(scores, values)))
    return torch.cat(mixed, dim=-1)


def add(x, sublayers, p):
    for f in sublayers:
        x = x + f(x)
    return x


def attention_residual(x, sublayers, p, heads=1, block=1, eps=1e-6):
    """AttnRes section 3.2 (block = 1: section 3.1), with the heads of MHAR."""
    blocks = [x]                                       # b_0 is the embedding
    site = 0
    while site < len(sublayers):
        partial = None
        for f in sublayers[site:site + block]:         # the last block takes the remainder
            sources = blocks if partial is None else blocks + [partial]
            y = f(depth_attention(sources, sources, p["query"][site], p["gain"][site], heads, eps))
            partial = y if partial is None else partial + y
            site += 1
        blocks = blocks + [partial]
    return depth_attention(blocks, blocks, p["query"][-1], p["gain"][-1], heads, eps)


def dual_attention_residual(x, sublayers, p, heads=1, block=2, eps=1e-6, key_of=(1, 0), value_of=(0, 1), streams=None):
    """
    DAR eqs. 10-17. Target stream j attends with the keys of stream key_of[j] over the values of stream value_of[j].
    A list given as `streams` receives the final history of stream 0 and of stream 1.
    """
    history = [[x], [x]]
    partial = None
    place = 0                                          # branches of the open block done so far

    def retrieve(row):
        entries = [history[j] + ([partial[j]] if partial is not None else []) for j in (0, 1)]
        h = [depth_attention(entries[value_of[j]], entries[key_of[j]], p["query"][row][j], p["gain"][row], heads, eps)
             for j in (0, 1)]
        seen = torch.cat([rms_normed(h[0], eps), rms_normed(h[1], eps)], dim=-1)
        gate = [1 / (1 + torch.exp(-((seen * p["gate_weight"][row][o]).sum(-1, keepdim=True) + p["gate_bias"][row][o])))
                for o in range(5)]
        alpha, beta, rho = gate[0:2], [2 * gate[2], 2 * gate[3]], gate[4]
        return alpha[0] * h[0] + alpha[1] * h[1], beta, rho

    for row, f in enumerate(sublayers):
        u, beta, rho = retrieve(row)
        y = f(u)
        if place == 0:
            partial = [beta[0] * y, beta[1] * y]
        else:
            M = [[rho, 1 - rho], [1 - rho, rho]]
            partial = [M[j][0] * partial[0] + M[j][1] * partial[1] + beta[j] * y for j in (0, 1)]
        place += 1
        if place == block:
            history = [history[0] + [partial[0]], history[1] + [partial[1]]]
            partial, place = None, 0
    u, _, _ = retrieve(-1)
    if streams is not None:
        streams += [history[j] + ([partial[j]] if partial is not None else []) for j in (0, 1)]
    return u


# which stream gives keys and which gives values, for target stream 0 and target stream 1
ROLES = {
    "dar": dict(key_of=(1, 0), value_of=(0, 1)),
    "dar_selfkv": dict(key_of=(0, 1), value_of=(0, 1)),
    "dar_crossv": dict(key_of=(0, 1), value_of=(1, 0)),
    "dar_fixed": dict(key_of=(0, 0), value_of=(1, 1)),
}


def readout(config, x, sublayers, p, **kw):
    """The function above that `config` asks for."""
    kw = dict(heads=config.route_heads, block=config.sites_per_block, eps=config.norm_eps) | kw
    if config.residual == "add":
        return add(x, sublayers, p)
    if config.residual in ("attnres", "mhar"):
        return attention_residual(x, sublayers, p, **kw)
    return dual_attention_residual(x, sublayers, p, **kw, **ROLES[config.residual])
