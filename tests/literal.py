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


def delta_attention_residual(x, sublayers, p, heads=1, block=1, eps=1e-6, recursive=False):
    """
    Delta section 3: h + attention over the embedding and what each closed block changed in h, both taken from the states
    that h went through. recursive: an entry is what h was at a boundary minus the entry before it, and is not seen by
    the site at the boundary. With "gate" in p there is a null source and a gate.
    """
    h, states = x, []
    for site, f in enumerate(sublayers):
        states = states + [h]                          # h before each site
        entries = []
        for boundary in range(0, len(sublayers), block):
            if boundary < site and recursive:
                entries = entries + [states[boundary] - entries[-1] if entries else states[boundary]]
            elif boundary <= site and site > 0 and not recursive:
                entries = entries + [states[boundary] - states[boundary - block] if boundary else states[boundary]]
        u = h
        if "gate" in p:
            null = p["null"][site].expand_as(h)
            u = h + p["gate"][site] * depth_attention([null] + entries, [null] + entries, p["query"][site], p["gain"][site], heads, eps)
        elif entries:
            u = h + depth_attention(entries, entries, p["query"][site], p["gain"][site], heads, eps)
        h = h + f(u)
    return h


def static_hyper_connections(x, sublayers, p, eps=1e-6):
    """The control of the MHAR paper: reads by softmax(alpha), mixes by `res`, writes by `post`; mean of the streams."""
    n = p["alpha"].shape[1]
    streams = [x] * n
    for site, f in enumerate(sublayers):
        weight = torch.exp(p["alpha"][site]) / torch.exp(p["alpha"][site]).sum()
        y = f(sum(weight[i] * streams[i] for i in range(n)))
        streams = [sum(p["res"][site][i, j] * streams[j] for j in range(n)) + p["post"][site][i] * y for i in range(n)]
    return sum(streams) / n


def hyper_connections(x, sublayers, p, eps=1e-6):
    """HC eqs. 10-13 with RMSNorm: every stream i gives its own row of the maps."""
    n = p["static_pre"].shape[1]
    streams = [x] * n
    for site, f in enumerate(sublayers):
        s_a, s_b = p["scale"][site]
        W_m, W_r, W_b = p["weight"][site][0], p["weight"][site][1:n + 1], p["weight"][site][n + 1]
        dot = lambda stream, w: (stream * w).sum(-1, keepdim=True)
        X = [rms_normed(stream, eps) * p["gain"][site] for stream in streams]
        A_m = [p["static_pre"][site][i] + s_a * torch.tanh(dot(X[i], W_m)) for i in range(n)]
        B = [p["static_post"][site][i] + s_b * torch.tanh(dot(X[i], W_b)) for i in range(n)]
        A_r = [[p["static_res"][site][i, k] + s_a * torch.tanh(dot(X[i], W_r[k])) for k in range(n)] for i in range(n)]
        y = f(sum(A_m[i] * streams[i] for i in range(n)))
        streams = [sum(A_r[i][k] * streams[i] for i in range(n)) + B[k] * y for k in range(n)]
    return sum(streams)


def manifold_hyper_connections(x, sublayers, p, eps=1e-6):
    """mHC eqs. 7-9: 20 times columns, then rows."""
    n = int((p["bias"].shape[1] + 1) ** 0.5) - 1       # n^2 + 2n numbers a site
    streams = torch.stack([x] * n, dim=-2)
    for site, f in enumerate(sublayers):
        raw = rms_normed(streams.flatten(-2), eps) @ p["weight"][site].T
        a, b = p["scale"][site], p["bias"][site]
        pre = torch.sigmoid(a[0] * raw[..., :n] + b[:n])
        post = 2 * torch.sigmoid(a[1] * raw[..., n:2 * n] + b[n:2 * n])
        M = torch.exp((a[2] * raw[..., 2 * n:] + b[2 * n:]).unflatten(-1, (n, n)))
        for _ in range(20):
            M = M / M.sum(-2, keepdim=True)
            M = M / M.sum(-1, keepdim=True)
        y = f(sum(pre[..., j, None] * streams[..., j, :] for j in range(n)))
        streams = torch.stack([sum(M[..., i, j, None] * streams[..., j, :] for j in range(n)) + post[..., i, None] * y
                               for i in range(n)], dim=-2)
    if "readout_weight" not in p:
        return streams.sum(-2)
    raw = rms_normed(streams.flatten(-2), eps) @ p["readout_weight"].T
    weight = torch.sigmoid(p["readout_scale"] * raw + p["readout_bias"])
    return sum(weight[..., j, None] * streams[..., j, :] for j in range(n))


# which stream gives keys and which gives values, for target stream 0 and target stream 1
ROLES = {
    "dar": dict(key_of=(1, 0), value_of=(0, 1)),
    "dar_selfkv": dict(key_of=(0, 1), value_of=(0, 1)),
    "dar_crossv": dict(key_of=(0, 1), value_of=(1, 0)),
    "dar_fixed": dict(key_of=(0, 0), value_of=(1, 1)),
}


def readout(config, x, sublayers, p, **kw):
    """The function above that `config` asks for."""
    hyper = {"hc_static": static_hyper_connections, "hc": hyper_connections, "mhc": manifold_hyper_connections}
    if config.residual == "add":
        return add(x, sublayers, p)
    if config.residual in hyper:
        return hyper[config.residual](x, sublayers, p, config.norm_eps)
    kw = dict(heads=config.route_heads, block=config.sites_per_block, eps=config.norm_eps) | kw
    if config.residual == "delta":
        return delta_attention_residual(x, sublayers, p, **kw, recursive=config.delta_entries == "recursive")
    if config.residual in ("attnres", "mhar"):
        return attention_residual(x, sublayers, p, **kw)
    return dual_attention_residual(x, sublayers, p, **kw, **ROLES[config.residual])
