"""
A transformer whose residual connection attends over depth.

In a plain transformer every sublayer reads the running sum of all earlier outputs. Here the way information travels
between sublayers is one object, the *pathway*, and the model is a flat list of 2L sublayers around it:

    state = pathway.start(embedding)
    for site, f in enumerate(sublayers):              attention, FFN, attention, FFN, ...
        h, carry = pathway.read(state, site)          what sublayer `site` sees
        state = pathway.write(state, f(h), site, carry)
    logits = lm_head(norm(pathway.readout(state)))

`add` is the plain residual. `attnres` (Attention Residuals, arXiv 2603.15031) and `mhar` (Multi-Head Attention Residuals,
arXiv 2607.27230) let each site attend over the outputs of all earlier ones; `dar` (Dual Attention Residuals,
arXiv 2607.18730) keeps two such histories, each choosing depths by the keys of the other. A new pathway is one class
and one entry of PATHWAYS.

Words: a *site* is where a sublayer is attached (0 .. 2L-1; index 2L is the readout); a *source* is a (B, T, C) tensor that
a read may choose from; a *depth block* is `sites_per_block` consecutive sites whose outputs are summed into one source.
Letters: B batch, T time, C width, L layers, N sources, H routing heads, K = C/H, D head_dim of token attention.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import route_kernels
from body import FFN, Attention, Context, KVCache, Linear, RMSNorm, rope_tables, token_losses
from errors import ConfigError, nearest

# ----------------------------------------------------------------------------------------------------------------------
# configuration


@dataclass
class ModelConfig:
    vocab_size: int = 151_936
    seq_len: int = 2048                   # context length in tokens
    n_layer: int = 12                     # L; the model has 2L sites
    n_head: int = 8
    n_kv_head: int = 4                    # grouped-query attention; must divide n_head
    head_dim: int | None = None           # D; None = d_model / n_head
    d_model: int = 512                    # C
    d_ff: int = 1536                      # SwiGLU hidden width
    rope_theta: float = 1e4
    rope_scaling: dict | None = None      # {"rope_type": "llama3", "factor": ..., ...} as in Hugging Face configs
    norm_eps: float = 1e-6
    qk_norm: bool = True                  # RMSNorm on each query and key head (Qwen3); off for Llama
    tie_embeddings: bool = True
    dropout: float = 0.0                  # on the embedding and on every sublayer's output
    init_std: float = 0.02                # of every matrix, whatever the pathway
    residual: str = "mhar"                # a name of PATHWAYS
    route_heads: int | None = None        # H of mhar (None = n_kv_head, as the MHAR paper sets it) and dar (None = 1)
    sites_per_block: int | None = None    # sites summed into one source; None = the pathway's full form (1; dar: 2)
    query_init_std: float = 0.0           # pseudo-queries; 0.02 reproduces the MHAR tables that used random ones

    def __post_init__(self):
        def need(ok, message):
            if not ok:
                raise ConfigError(message)

        for name in ("vocab_size", "seq_len", "n_layer", "n_head", "n_kv_head", "d_model", "d_ff"):
            value = getattr(self, name)
            need(type(value) is int and value >= 1, f"{name} must be a whole number, at least 1, not {value!r}")
        need(self.n_head % self.n_kv_head == 0,
             f"n_kv_head must divide n_head, but n_head={self.n_head} and n_kv_head={self.n_kv_head}")
        if self.head_dim is None:
            need(self.d_model % self.n_head == 0, f"n_head must divide d_model, but d_model={self.d_model} and "
                                                  f"n_head={self.n_head}; or set head_dim")
            self.head_dim = self.d_model // self.n_head
        need(self.head_dim >= 2 and self.head_dim % 2 == 0,
             f"head_dim must be even (rotary pairs), not {self.head_dim}")
        need(0 <= self.dropout < 1, f"dropout must be in [0, 1), not {self.dropout}")
        for name in ("rope_theta", "norm_eps", "init_std"):
            need(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        need(self.query_init_std >= 0, f"query_init_std must not be negative, not {self.query_init_std}")
        if self.rope_scaling is not None:
            kind = self.rope_scaling.get("rope_type")
            need(kind == "llama3", f"rope_scaling['rope_type'] must be 'llama3', not {kind!r}")
            missing = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
            missing -= set(self.rope_scaling)
            need(not missing, f"rope_scaling lacks {', '.join(sorted(missing))}")

        need(self.residual in PATHWAYS, f"unknown residual={self.residual!r}{nearest(self.residual, PATHWAYS)}; "
                                        f"known: {', '.join(PATHWAYS)}")
        pathway = PATHWAYS[self.residual]
        if self.route_heads is None or not pathway.multi_head:
            self.route_heads = pathway.default_heads(self)
        need(self.route_heads >= 1 and self.d_model % self.route_heads == 0,
             f"route_heads must divide d_model, but d_model={self.d_model} and route_heads={self.route_heads}")
        if self.sites_per_block is None:
            self.sites_per_block = pathway.min_sites_per_block
        need(self.sites_per_block >= pathway.min_sites_per_block,
             f"residual={self.residual!r} needs sites_per_block >= {pathway.min_sites_per_block}, "
             f"not {self.sites_per_block}{pathway.why_min_sites}")


# ----------------------------------------------------------------------------------------------------------------------
# pathways. `write` returns a new state and changes nothing, but that a history of sources grows.


class Pathway(nn.Module):
    """
    How information travels between sites. One object owns the parameters of all sites, stacked: row `site` of a
    parameter belongs to that site, the last row to the readout.

        start(x)                     -> state      x (B, T, C) is the embedding
        read(state, site)            -> h, carry   h (B, T, C) is the sublayer's input; carry goes to write as it is
        write(state, y, site, carry) -> state      y (B, T, C) is the sublayer's output
        readout(state)               -> h          what the final norm sees
    """
    multi_head = False                    # does route_heads apply?
    min_sites_per_block = 1
    why_min_sites = ""

    @staticmethod
    def default_heads(config):
        return 1

    def __init__(self, config):
        super().__init__()
        self.n_site = 2 * config.n_layer
        self.route_heads, self.sites_per_block = config.route_heads, config.sites_per_block
        self.norm_eps, self.query_init_std = config.norm_eps, config.query_init_std
        self.rung = None                  # of route_kernels, how depth is read; set by GPT
        self.recorder = None              # a list that collects depth weights, set by GPT.depth_weights

    def init_weights(self, generator):
        """Initial values of the pathway's own parameters."""

    def param_groups(self):
        """Optimizer groups of the pathway's parameters. All decay, as in the MHAR recipe (its appendix I)."""
        return [{"name": "pathway", "params": list(self.parameters())}] if self.num_params() else []

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Forward FLOPs of all reads and writes of one token, residual additions not counted."""
        return 0

    def saved_per_site(self):
        """Multiples of C kept for backward per token and site by read and write: here the sublayer's input."""
        return 1

    def sources(self, site):
        """Names of the sources that the read at `site` chooses from."""
        return ["running sum"]

    def closes_block(self, site):
        """Does the output of `site` complete a depth block?"""
        return False


class Add(Pathway):
    """The plain residual: h <- h + f(h)."""

    def start(self, x):
        return x

    def read(self, state, site):
        return state, None

    def write(self, state, y, site, carry):
        return state + y

    def readout(self, state):
        return state


class AttnRes(Pathway):
    """
    Attention Residuals (arXiv 2603.15031, section 3). The sources are the embedding and each raw sublayer output; each
    site attends over them with a learned query of its own (`route_kernels.depth_weights` has the equation), and the
    mix replaces the residual sum. The readout is one more read. With sites_per_block = S > 1 the outputs of S
    consecutive sites are summed into one source (its Block form, section 3.2); a block still open is read as it stands,
    and the last one takes the remainder.

    Queries start at zero, gains at one: each read starts as the plain mean of its sources.
    """
    key_stream = value_stream = (0,)      # of a read, for each stream that is read

    def __init__(self, config):
        super().__init__(config)
        rows = self.n_site + 1
        self.query = nn.Parameter(torch.zeros(rows, config.d_model))
        self.gain = nn.Parameter(torch.ones(rows, config.d_model))

    def init_weights(self, generator):
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.query)
        if self.query_init_std > 0:
            nn.init.normal_(self.query, std=self.query_init_std, generator=generator)

    def start(self, x):
        query = self.query.view(len(self.gain), -1, self.gain.shape[-1])           # (2L+1, streams, C)
        history = self.rung.history(self.rung, query, self.gain, self.route_heads, self.norm_eps, self.key_stream,
                                    self.value_stream, self.sites_per_block)
        history.append((x,) * query.shape[1])
        return history, None                                       # and the open block's sum, a tensor a stream

    def mixes(self, state, site):
        """The depth read of each stream, a tuple of (B, T, C)."""
        history, open_block = state
        if self.recorder is not None:
            self.recorder.append(history.weights(site, open_block))
        return history.read(site, open_block)

    def read(self, state, site):
        (h,) = self.mixes(state, site)
        return h, None

    def write(self, state, y, site, carry):
        history, open_block = state
        return self.close(history, (y if open_block is None else open_block[0] + y,), site)

    def close(self, history, block, site):
        """The state after `site` wrote to `block`: a source of the history if that was its last site."""
        if not self.closes_block(site):
            return history, block
        history.append(block)
        return history, None

    def closes_block(self, site):
        return (site + 1) % self.sites_per_block == 0

    def readout(self, state):
        h, _ = self.read(state, self.n_site)
        return h

    def sources(self, site):
        S = self.sites_per_block
        closed = [f"sites {i}-{i + S - 1}" if S > 1 else f"site {i}" for i in range(0, site - S + 1, S)]
        still_open = [f"open sites {site - site % S}-{site - 1}"] if site % S else []
        return ["embedding"] + closed + still_open

    def saved_per_site(self):
        return 2                                                   # and the source it writes

    def flops_per_token(self):
        # per source and channel: mean square, logit and mix, each one multiply-add
        return sum(6 * self.gain.shape[-1] * len(self.sources(site)) for site in range(1, self.n_site + 1))


class MHAR(AttnRes):
    """
    Multi-Head Attention Residuals (arXiv 2607.27230, eq. 3): AttnRes with `route_heads` heads, each with its own softmax
    over depth for its own slice of channels. The parameters are AttnRes's; with one head it is AttnRes.
    """
    multi_head = True

    @staticmethod
    def default_heads(config):
        return config.n_kv_head                                    # the setting of the paper's section 3.1


class DAR(AttnRes):
    """
    Dual Attention Residuals (arXiv 2607.18730, eqs. 10-17). Two streams j = 0, 1 have a history of blocks each. Stream j
    is read by attention over depth whose *values* are its own raw entries and whose *keys* are the other stream's:

        h_j = sum_r softmax_r(<q_j, gain * Norm(entry_r of stream 1-j)>) entry_r of stream j
        u   = alpha_0 h_0 + alpha_1 h_1                                          the sublayer's input
        P_j = beta_j y                                                           after the first site of a block
        P   = M(rho) P + beta y,   M(rho) = [[rho, 1-rho], [1-rho, rho]]         after each later one

    P, the open block, is an entry like the closed ones. alpha (2), beta (2) and rho (1) are scalars of each token, gated
    by a linear map of (Norm(h_0), Norm(h_1)).

    The paper's text is not public; this follows public descriptions of it. Stated there: cross-stream keys, raw own-stream
    values, one key norm shared by the streams, alpha, beta and M(rho) and where they act, blocks of 2 layers and no
    blocks of one site. Inferred by us: alpha = sigmoid, beta = 2 sigmoid, rho = sigmoid with bias +2, the gate
    input's norm (each read by itself, no weight), the learned gain, both streams starting as the embedding, and the
    readout (one more read and alpha mix).

    Gate weights start at N(0, 0.02) and never at zero: nothing else tells the two streams apart, and with symmetric
    gates they would stay equal for ever.
    """
    multi_head = True                                              # our extension; the paper has one head
    min_sites_per_block = 2
    why_min_sites = ": with one branch a block both streams are multiples of one output, so the keys of the two coincide"
    key_stream, value_stream = (1, 0), (0, 1)                      # of target stream 0 and of target stream 1

    def __init__(self, config):
        super().__init__(config)
        rows, C = self.gain.shape
        self.query = nn.Parameter(torch.zeros(rows, 2, C))
        self.gate_weight = nn.Parameter(torch.zeros(rows, 5, 2 * C))    # outputs: alpha_0, alpha_1, beta_0, beta_1, rho
        self.gate_bias = nn.Parameter(torch.zeros(rows, 5))

    def init_weights(self, generator):
        super().init_weights(generator)
        nn.init.normal_(self.gate_weight, std=0.02, generator=generator)
        nn.init.zeros_(self.gate_bias)
        nn.init.constant_(self.gate_bias[:, 4], 2.0)               # M(rho) starts near the identity

    def read(self, state, site):
        h = self.mixes(state, site)
        wide = torch.promote_types(h[0].dtype, torch.float32)
        seen = torch.cat([F.rms_norm(h_j.to(wide), h_j.shape[-1:], eps=self.norm_eps) for h_j in h], dim=-1)
        gates = F.linear(seen, self.gate_weight[site].to(wide), self.gate_bias[site].to(wide)).sigmoid()
        alpha, beta, rho = gates.to(h[0].dtype).split((2, 2, 1), dim=-1)         # (B, T, 2), (B, T, 2), (B, T, 1)
        return alpha[..., :1] * h[0] + alpha[..., 1:] * h[1], (2 * beta, rho)

    def write(self, state, y, site, carry):
        history, block = state
        beta, rho = carry
        new = beta[..., :1] * y, beta[..., 1:] * y
        if block is not None:
            p0, p1 = block
            new = new[0] + rho * p0 + (1 - rho) * p1, new[1] + (1 - rho) * p0 + rho * p1
        return self.close(history, new, site)

    def saved_per_site(self):
        return 8                                                   # and h_j, their norms, y, and a pair of entries

    def flops_per_token(self):
        return 2 * super().flops_per_token() + sum(2 * w.numel() for w in self.gate_weight)


class DARSelfKV(DAR):
    """Ablation: each stream's own entries are its keys (DAR's Table 4)."""
    key_stream, value_stream = (0, 1), (0, 1)


class DARCrossV(DAR):
    """Ablation: the roles of the streams exchanged, own keys choose the other stream's values (our reading of Table 4)."""
    key_stream, value_stream = (0, 1), (1, 0)


class DARFixed(DAR):
    """Ablation: fixed roles, stream 0 gives the keys and stream 1 the values of both reads."""
    key_stream, value_stream = (0, 0), (1, 1)


PATHWAYS = {"add": Add, "attnres": AttnRes, "mhar": MHAR,
            "dar": DAR, "dar_selfkv": DARSelfKV, "dar_crossv": DARCrossV, "dar_fixed": DARFixed}


# ----------------------------------------------------------------------------------------------------------------------
# the model

class GPT(nn.Module):
    """
    config     ModelConfig
    init_seed  seed of the initial weights; the body's are drawn first and do not depend on the pathway
    kernels    how depth is read: a name of route_kernels.RUNGS; `route_kernels.choose` knows which runs where
    Attributes to set before use: `compute_dtype` (None = the weights' own) and `checkpoint` (True = keep only the input
    of each sublayer and run it again in backward).
    """

    def __init__(self, config, init_seed=0, kernels="lean"):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.sublayers = nn.ModuleList(cls(config) for _ in range(config.n_layer) for cls in (Attention, FFN))
        self.pathway = PATHWAYS[config.residual](config)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = Linear(config.d_model, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if kernels not in route_kernels.RUNGS:
            raise ConfigError(f"unknown kernels={kernels!r}{nearest(kernels, route_kernels.RUNGS)}; "
                              f"known: {', '.join(route_kernels.RUNGS)}")
        self.kernels = kernels
        self.pathway.rung = route_kernels.RUNGS[kernels]
        self.compute_dtype = None
        self.checkpoint = False
        if not self.embed.weight.is_meta:
            self.init_weights(init_seed)

    @torch.no_grad()
    def init_weights(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.startswith("pathway."):
                continue
            elif name.endswith("norm.weight"):
                p.fill_(1.0)
            elif name.endswith(("embed.weight", "proj.weight", "lm_head.weight")):
                nn.init.normal_(p, std=self.config.init_std, generator=generator)
            else:
                raise AssertionError(f"no rule to initialise {name}")
        self.pathway.init_weights(torch.Generator().manual_seed(seed + 1))

    def hidden(self, idx, cache=None):
        """Final hidden states (B, T, C), normed, of token ids idx (B, T)."""
        start = 0 if cache is None else cache.length
        stop = start + idx.shape[1]
        if stop > self.config.seq_len:
            raise ConfigError(f"{stop} tokens do not fit the context of {self.config.seq_len} (seq_len)")
        ctx = Context(self.cos[start:stop], self.sin[start:stop], cache)
        x = self.dropout(self.embed(idx))
        state = self.pathway.start(x if self.compute_dtype is None else x.to(self.compute_dtype))
        for site, f in enumerate(self.sublayers):
            h, carry = self.pathway.read(state, site)
            y = checkpoint(f, h, ctx, use_reentrant=False) if self.checkpoint and self.training else f(h, ctx)
            state = self.pathway.write(state, y, site, carry)
        if cache is not None:
            cache.length = stop
        return self.norm(self.pathway.readout(state))

    def forward(self, idx, targets=None, reduction="mean", z_loss=0.0):
        """
        idx (B, T) token ids -> (logits (B, T, V), None), or with targets (B, T; -100 = not scored) -> (None, loss): the
        logits of a whole batch are never made then. The loss is in nats, the mean over scored tokens, or one a token
        with reduction="none" (B, T).
        """
        h = self.hidden(idx)
        if targets is None:
            return self.lm_head(h), None
        loss = token_losses(h.flatten(0, 1), self.lm_head.weight, targets.flatten(), z_loss)
        if reduction == "none":
            return None, loss.view_as(targets)
        return None, loss.sum() / (targets >= 0).sum()

    @torch.no_grad()
    def depth_weights(self, idx):
        """
        The weights of every read of idx (B, T): a list of (streams, N, B, T, H), one entry a site, the last the readout;
        summing to 1 over N. Empty for a pathway that does not attend over depth. Without dropout.
        """
        self.pathway.recorder = found = []
        was_training, rung = self.training, self.pathway.rung
        self.pathway.rung = route_kernels.RUNGS["reference"]
        try:
            self.eval().hidden(idx)
        finally:
            self.pathway.recorder, self.pathway.rung = None, rung
            self.train(was_training)
        return found

    # ---- sampling

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_vocab=None, generator=None,
               use_cache=True):
        """
        Yield up to max_new_tokens tensors (B,), the tokens that follow idx (B, T), T >= 1.

        temperature 0 takes the likeliest token; top_k (None or 0 = off) and top_p in (0, 1] cut the tail; ids from n_vocab
        on (rows that pad the embedding) are never drawn. Of a prompt longer than seq_len the newest seq_len tokens are
        read. When the context is full, the newest seq_len // 2 tokens are read again and sampling goes on from there.
        The model must be in evaluation mode.
        """
        if self.training and self.config.dropout:
            raise ConfigError("sampling with dropout: call model.eval() first")
        n_vocab = n_vocab or self.config.vocab_size
        if idx.shape[1] == 0:
            raise ConfigError("the prompt is empty: start from the tokenizer's end-of-text id")
        if not 0 <= temperature < float("inf"):
            raise ConfigError(f"temperature must be a number, at least 0, not {temperature}")
        if top_k is not None and top_k < 0:
            raise ConfigError(f"top_k must not be negative, not {top_k} (0 or None = off)")
        if top_p is not None and not 0 < top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], not {top_p}")
        context = idx[:, -self.config.seq_len:]
        unread, cache = context, KVCache()
        for _ in range(max_new_tokens):
            h = self.hidden(unread, cache) if use_cache else self.hidden(context)
            logits = self.lm_head(h[:, -1])[:, :n_vocab]
            if not torch.isfinite(logits).all():
                raise ConfigError(f"non-finite logits at position {context.shape[1] - 1}: the checkpoint is broken")
            token = draw(logits.to(torch.promote_types(logits.dtype, torch.float32)), temperature, top_k, top_p, generator)
            yield token
            context = torch.cat((context, token[:, None]), dim=1)
            unread = token[:, None]
            if context.shape[1] > self.config.seq_len:
                context = context[:, -max(1, self.config.seq_len // 2):]
                unread, cache = context, KVCache()

    def generate(self, idx, max_new_tokens, **sampling):
        """idx (B, T) followed by max_new_tokens tokens, (B, T + max_new_tokens). Arguments of `stream`."""
        return torch.cat((idx, *(token[:, None] for token in self.stream(idx, max_new_tokens, **sampling))), dim=1)

    # ---- counts and descriptions

    def param_groups(self):
        """Optimizer groups: the body's parameters, and the pathway's own."""
        body = [p for name, p in self.named_parameters() if not name.startswith("pathway.")]
        return [{"name": "body", "params": body}, *self.pathway.param_groups()]

    def num_params(self):
        """All parameters, tied ones once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """FLOPs of training on one token: 3 times the forward's (sublayers, pathway, head)."""
        forward = sum(f.flops_per_token(self.config.seq_len) for f in self.sublayers) + self.pathway.flops_per_token()
        return 3 * (forward + 2 * self.lm_head.weight.numel())

    def saved_per_token(self, checkpoint=False):
        """Elements of activations kept for backward per token, an estimate; logits not counted."""
        sizes = [f.saved_per_token() for f in self.sublayers]
        return self.config.d_model * self.pathway.saved_per_site() * len(sizes) + (max(sizes) if checkpoint else sum(sizes))

    def describe(self):
        """The topology, a line a site: the sublayer, how many sources it reads and which."""
        c, p = self.config, self.pathway
        lines = [f"residual={c.residual}: {c.n_layer} layers, {p.n_site} sites, {self.num_params():,} parameters, of them "
                 f"{p.num_params():,} routing; {c.route_heads} routing head(s), {c.sites_per_block} site(s) a depth block"]
        for site in range(p.n_site + 1):
            kind = "readout" if site == p.n_site else type(self.sublayers[site]).__name__
            sources = p.sources(site)
            shown = sources if len(sources) <= 6 else sources[:3] + ["..."] + sources[-2:]
            ends = "  | closes its block" if site < p.n_site and c.sites_per_block > 1 and p.closes_block(site) else ""
            lines.append(f"  {site:3d} {kind:9s} reads {len(sources):2d}: {', '.join(shown)}{ends}")
        return "\n".join(lines)

    # ---- loading

    def load_weights(self, weights):
        """Take over the tensors of a state dict (they are not copied); every name must be there and no other."""
        prefixes = ("_orig_mod.", "module.")                       # of models saved while compiled or wrapped for DDP
        while any(name.startswith(prefixes) for name in weights):
            weights = {name.removeprefix("_orig_mod.").removeprefix("module."): w for name, w in weights.items()}
        own = self.state_dict()
        faults = [f"lacks {name}" for name in own.keys() - weights.keys()]
        faults += [f"has {name}, which this model has not" for name in weights.keys() - own.keys()]
        faults += [f"has {name} as {tuple(weights[name].shape)}, not {tuple(w.shape)}"
                   for name, w in own.items() if name in weights and weights[name].shape != w.shape]
        if faults:
            more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
            raise ConfigError("the checkpoint " + ", ".join(sorted(faults)[:3]) + more)
        self.load_state_dict(weights, assign=True)
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self.cos, self.sin = (table.to(self.embed.weight.device) for table in rope_tables(self.config))

    @classmethod
    def from_checkpoint(cls, path, weights="model", kernels="lean"):
        """The model of a checkpoint of train.py, in evaluation mode, on the CPU. `weights` is "model" or "ema"."""
        state = path if isinstance(path, dict) else load_checkpoint(path)
        if weights not in state:
            raise ConfigError(f"the checkpoint has no {weights!r} weights; it has {', '.join(state)}")
        known = {f.name for f in fields(ModelConfig)}
        with torch.device("meta"):
            model = cls(ModelConfig(**{k: v for k, v in state["config"].items() if k in known}), kernels=kernels)
        model.load_weights(state[weights])
        return model.eval()


def load_checkpoint(path):
    """
    The dict that train.py saved, on the CPU; `path` is the file, or the out_dir of a run (its latest checkpoint).
    Nothing in the file is executed: anything but tensors and plain values is refused.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "ckpt" / "latest.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"no checkpoint at {path}") from None
    except Exception as e:                                         # damaged files make torch raise almost anything
        reason = (str(e).splitlines() or [type(e).__name__])[0][:120]
        raise ConfigError(f"{path} is not a nanoDepth checkpoint, or is cut short ({reason})") from None
    if not isinstance(state, dict) or not {"config", "model"} <= state.keys():
        raise ConfigError(f"{path} is not a nanoDepth checkpoint: it has no config and model")
    return state


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
    return torch.multinomial(p, 1, generator=generator).squeeze(-1)
