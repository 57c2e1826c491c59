"""
What a sublayer is made of, whatever the pathway: Qwen3's attention and FFN (and, with qk_norm=False, tie_embeddings=False
and rope_scaling, Llama's), a sparse mixture of experts in place of the FFN, and the loss over the vocabulary.
Nothing here knows about depth.

A sublayer is a module f(x, ctx) with x (B, T, C): its own pre-norm, then the branch. It counts its FLOPs and what it keeps
for backward. Letters: B batch, T time, P = B T tokens, C width, D head_dim, E experts, F hidden width, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Linear(nn.Linear):
    """Without bias; computes in the dtype of its input, so that fp32 master weights can serve bf16 activations."""

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Context(NamedTuple):
    """What attention needs beside its input."""
    cos: torch.Tensor                     # (T, D) rotary tables of the positions at hand, or (B, 1, T, D)
    sin: torch.Tensor
    mask: torch.Tensor | None = None      # (B, 1, T, T) what each token may attend to; None = itself and all before it
    cache: "KVCache | None" = None        # when sampling
    aux: dict | None = None               # in training: MoE sublayer -> its auxiliary loss


class KVCache:
    """Keys and values of the tokens read so far, per attention sublayer."""

    def __init__(self, pad=None):
        self.length = 0                   # tokens read by the whole model
        self.pad = pad                    # (B,): how many tokens at the left of each row are padding; None = none
        self.kv = {}                      # attention sublayer -> (k, v), each (B, n_kv_head, length, D)

    def extend(self, sublayer, k, v):
        if sublayer in self.kv:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.kv[sublayer], (k, v)))
        self.kv[sublayer] = k, v
        return k, v


def documents(idx, eot):
    """
    Of token ids (B, T): what each token may attend to (B, 1, T, T), and its position in its document (B, T). A document starts
    with the end-of-text id before it, which is how `eval.py text` presents a text; a window may start inside of one.
    """
    starts, at = idx == eot, torch.arange(idx.shape[1], device=idx.device)
    number, first = starts.cumsum(1), torch.where(starts, at, 0).cummax(1).values
    return (number[:, :, None] == number[:, None, :]).tril().unsqueeze(1), at - first


def padded(pad, start, stop):
    """
    Of tokens start .. stop of rows that begin with `pad` (B,) tokens of padding: what each may attend to (B, 1, T, stop), and its
    position (B, T). Padding sees itself, as a softmax over nothing is no number; nobody else sees it.
    """
    key, query = torch.arange(stop, device=pad.device), torch.arange(start, stop, device=pad.device)[:, None]
    real = (key >= pad[:, None, None]) & (key <= query)
    return (real | (key == query)).unsqueeze(1), (query.mT - pad[:, None]).clamp(min=0)


def rope_tables(config):
    """cos and sin, each (seq_len, D), fp32. The two halves of a head rotate together (as in Qwen3 and Llama)."""
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if config.rope_scaling is not None:                                        # Llama 3: slow frequencies are stretched
        s = config.rope_scaling
        turns = s["original_max_position_embeddings"] / (2 * torch.pi / inv_freq)            # over the old context
        smooth = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        smooth = smooth.clamp(0, 1)
        inv_freq = (1 - smooth) * inv_freq / s["factor"] + smooth * inv_freq
    angle = torch.outer(torch.arange(config.seq_len).float(), inv_freq)        # (T, D/2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary embedding of x (..., T, D)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Pre-norm causal self-attention: grouped queries, per-head query and key norm, rotary positions."""

    def __init__(self, config):
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.norm = RMSNorm(c.d_model, c.norm_eps)
        self.q_proj = Linear(c.d_model, c.n_head * c.head_dim)
        self.k_proj = Linear(c.d_model, c.n_kv_head * c.head_dim)
        self.v_proj = Linear(c.d_model, c.n_kv_head * c.head_dim)
        self.o_proj = Linear(c.n_head * c.head_dim, c.d_model)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, ctx):                                                 # x (B, T, C)
        x = self.norm(x)
        q, k, v = (proj(x).view(*x.shape[:-1], -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)        # (B, heads, T, D)
        if ctx.cache is not None:
            k, v = ctx.cache.extend(self, k, v)
        T, S = q.shape[2], k.shape[2]                                          # S - T tokens come from the cache
        mask = ctx.mask
        if mask is None and T not in (1, S):
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T == S,
                                           enable_gqa=q.shape[1] != k.shape[1])
        return self.dropout(self.o_proj(y.transpose(1, 2).flatten(2)))

    def flops_per_token(self, seq_len):
        """Forward multiply-adds times two; attention over the whole context, as in PaLM (no discount for causality)."""
        matmuls = sum(2 * p.numel() for name, p in self.named_parameters() if name.endswith("proj.weight"))
        return matmuls + 4 * seq_len * self.o_proj.in_features

    def saved_per_token(self):
        """Elements kept for backward by fused kernels: normed input; queries, keys, values before and after their norm;
        the output of attention."""
        return self.q_proj.in_features + 3 * self.q_proj.out_features + 3 * self.k_proj.out_features


class SwiGLU(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj = Linear(width, hidden)
        self.up_proj = Linear(width, hidden)
        self.down_proj = Linear(hidden, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FFN(SwiGLU):
    """Pre-norm SwiGLU."""

    def __init__(self, config):
        super().__init__(config.d_model, config.d_ff)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, ctx):                                                 # x (B, T, C)
        return self.dropout(super().forward(self.norm(x)))

    def flops_per_token(self, seq_len):
        return sum(2 * p.numel() for name, p in self.named_parameters() if name.endswith("proj.weight"))

    def saved_per_token(self):
        """Elements kept for backward: normed input; gate, its SiLU, up and their product."""
        return self.gate_proj.in_features + 4 * self.gate_proj.out_features


class MoE(nn.Module):
    """
    Pre-norm sparse mixture of SwiGLU experts, routed as in DeepSeek-V3 (arXiv 2412.19437, eqs. 12-16): expert e has score
    s_e = sigmoid(<router_e, x>); a token takes the moe_top_k experts of largest s_e + bias_e and adds up their outputs in
    proportion to s_e (to the chosen scores, which sum to one), and those of moe_n_shared shared experts. No token is ever
    dropped. Scores are fp32 or wider.

    bias is no parameter: after each optimizer step it moves by moe_bias_rate up for experts with less load than the mean
    and down for the others (arXiv 2408.15664, algorithm 1). moe_aux_loss adds the auxiliary loss of Switch Transformers
    (arXiv 2101.03961, eq. 4), E sum_e f_e p_e of each sequence batch, to the gradient.
    """

    def __init__(self, config):
        super().__init__()
        c = config
        self.top_k, self.bias_rate, self.aux_loss = c.moe_top_k, c.moe_bias_rate, c.moe_aux_loss
        self.norm = RMSNorm(c.d_model, c.norm_eps)
        self.router = Router(c.d_model, c.moe_n_expert)
        self.gate_proj = GroupedLinear(c.moe_n_expert, c.d_model, c.moe_d_ff)
        self.up_proj = GroupedLinear(c.moe_n_expert, c.d_model, c.moe_d_ff)
        self.down_proj = GroupedLinear(c.moe_n_expert, c.moe_d_ff, c.d_model)
        self.shared = SwiGLU(c.d_model, c.moe_n_shared * c.moe_d_ff) if c.moe_n_shared else None
        self.dropout = nn.Dropout(c.dropout)
        self.register_buffer("bias", torch.zeros(c.moe_n_expert))
        self.register_buffer("load", torch.zeros(c.moe_n_expert), persistent=False)        # choices since the last `balance`

    def forward(self, x, ctx):                                                 # x (B, T, C)
        x = self.norm(x)
        flat = x.flatten(0, -2)                                                # (P, C)
        scores = self.router(flat).sigmoid()                                   # (P, E)
        chosen = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices            # (P, k)
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        ones = torch.ones_like(chosen, dtype=self.load.dtype).flatten()
        load = torch.zeros_like(self.load).scatter_add_(0, chosen.flatten(), ones)         # (E,)
        if self.training:
            self.load += load
            if self.aux_loss:
                p = (scores / scores.sum(-1, keepdim=True)).mean(0)
                share = load.to(p.dtype) / chosen.numel()
                ctx.aux.setdefault(self, self.aux_loss * len(load) * (share * p).sum())    # once: checkpointing runs this again

        order = chosen.flatten().argsort(stable=True)                          # of the P k choices, by expert
        ends = load.cumsum(0).to(torch.int32)
        rows = flat[order // self.top_k]                                       # (P k, C)
        y = self.down_proj(F.silu(self.gate_proj(rows, ends)) * self.up_proj(rows, ends), ends)
        y = y[order.argsort()].unflatten(0, chosen.shape)                      # (P, k, C), back in the order of tokens
        y = (weights.unsqueeze(-1) * y).sum(1).to(x.dtype).view_as(x)
        return self.dropout(y if self.shared is None else y + self.shared(x))

    @torch.no_grad()
    def balance(self, load):
        """After an optimizer step, given how often each expert was chosen in the whole batch (E,)."""
        self.bias += self.bias_rate * (load.mean() - load).sign()
        self.load.zero_()

    def idle_params(self):
        """Parameters of the experts that a token does not take."""
        each = sum(p.numel() // len(p) for p in (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight))
        return each * (len(self.bias) - self.top_k)

    def flops_per_token(self, seq_len):
        weights = sum(p.numel() for name, p in self.named_parameters() if not name.endswith("norm.weight"))
        return 2 * (weights - self.idle_params())

    def saved_per_token(self):
        """Elements kept for backward: normed input and scores; for each choice its input, gate, SiLU, up, product, output."""
        C, E = self.router.in_features, self.router.out_features
        shared = 4 * self.shared.gate_proj.out_features if self.shared is not None else 0
        return 2 * C + 2 * E + self.top_k * (2 * C + 4 * self.gate_proj.weight.shape[1]) + shared


class Router(Linear):
    """Its logits are fp32 or wider."""

    def forward(self, x):
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32)))


class GroupedLinear(nn.Module):
    """One linear map without bias for each group of rows."""

    def __init__(self, n_group, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_group, n_out, n_in))

    def forward(self, x, ends):
        """x (M, n_in), its rows sorted by group; ends (n_group,) int32, the number of rows up to each group's end
        -> (M, n_out)."""
        weight = self.weight.to(x.dtype).mT
        if x.dtype == torch.bfloat16:                                          # all that torch promises a kernel for
            return F.grouped_mm(x, weight, offs=ends)
        return grouped_matmul(x, weight, ends)


def grouped_matmul(x, weight, ends):
    """The specification of F.grouped_mm: x (M, n_in), weight (n_group, n_in, n_out) -> (M, n_out)."""
    return torch.cat([rows @ w for rows, w in zip(x.tensor_split(ends[:-1].cpu().long()), weight)])


LOGITS_AT_ONCE = 2 ** 28                  # at most 1 GiB of fp32 logits live at a time


def token_losses(h, weight, targets, z_loss=0.0):
    """
    Cross entropy of each token, in nats, fp32 or wider.

    h (n, C), weight (V, C), targets (n,), -100 = not scored (loss 0) -> (n,). Logits are made for some rows at a time and
    made again in backward, so those of a whole batch never exist. `z_loss` > 0 adds the *gradient* of
    z_loss * logsumexp(logits)^2 (PaLM, section 5); the value returned stays the cross entropy.
    """
    weight = weight.to(h.dtype)

    def losses(h, targets):
        logits = F.linear(h, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, targets, reduction="none")
        if z_loss:
            z = z_loss * logits.logsumexp(-1).square() * (targets >= 0)
            loss = loss + (z - z.detach())
        return loss

    rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
    if len(h) <= rows:
        return losses(h, targets)
    return torch.cat([checkpoint(losses, *part, use_reentrant=False) for part in zip(h.split(rows), targets.split(rows))])
