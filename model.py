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
arXiv 2607.18730) keeps two such histories, each choosing depths by the keys of the other. What the papers compare with:
`delta` (Delta Attention Residuals) reads a history beside the plain residual; `hc_static`, `hc` and `mhc`
(hyper-connections) carry several streams. A new pathway is one class and one entry of PATHWAYS.

Words: a *site* is where a sublayer is attached (0 .. 2L-1; index 2L is the readout); a *source* is a (B, T, C) tensor that
a read may choose from; a *depth block* is `sites_per_block` consecutive sites whose outputs are summed into one source.
Letters: B batch, T time, C width, L layers, N sources, H routing heads, K = C/H, D head_dim of token attention.
"""

import contextlib
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import route_kernels
import sampling
from body import FFN, Attention, Context, Linear, MoE, RMSNorm, documents, padded, rope_tables, token_losses
from checkpoints import load_checkpoint
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
    moe_n_expert: int = 0                 # E > 0: sparse mixtures of experts in place of FFNs
    moe_top_k: int = 2                    # experts a token takes
    moe_d_ff: int | None = None           # hidden width of an expert
    moe_n_shared: int = 0                 # experts that every token takes beside them
    moe_n_dense: int = 0                  # leading layers that keep the FFN of width d_ff
    moe_bias_rate: float = 1e-3           # step of the bias that balances the experts; 0 = off
    moe_aux_loss: float = 0.0             # weight of the auxiliary loss that balances the experts
    query_init_std: float = 0.0           # pseudo-queries; 0.02 reproduces the MHAR tables that used random ones
    delta_entries: str = "changes"        # of delta: what its sources are, "changes" or "recursive"
    delta_gate: bool = False              # of delta: a gate and a null source for each site, to convert a trained model
    n_stream: int = 4                     # n of hc_static, hc and mhc
    mhc_readout: str = "sum"              # of mhc: "sum" of the streams, or a "learned" mix

    def __post_init__(self):
        def need(ok, message):
            if not ok:
                raise ConfigError(message)

        for name in ("vocab_size", "seq_len", "n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "n_stream"):
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

        if self.moe_n_expert:
            need(self.moe_n_expert >= 1, f"moe_n_expert must not be negative, not {self.moe_n_expert}")
            need(1 <= self.moe_top_k <= self.moe_n_expert,
                 f"moe_top_k must be in 1 .. moe_n_expert, but moe_top_k={self.moe_top_k} and moe_n_expert={self.moe_n_expert}")
            for name in ("d_model", "moe_d_ff"):               # grouped_mm wants rows of whole 16 bytes
                value = getattr(self, name)
                need(value and value % 8 == 0, f"{name} must be a multiple of 8 with experts, not {value}")
            need(0 <= self.moe_n_dense <= self.n_layer,
                 f"moe_n_dense must be in 0 .. n_layer, but moe_n_dense={self.moe_n_dense} and n_layer={self.n_layer}")
            for name in ("moe_n_shared", "moe_bias_rate", "moe_aux_loss"):
                need(getattr(self, name) >= 0, f"{name} must not be negative, not {getattr(self, name)}")

        need(self.residual in PATHWAYS, f"unknown residual={self.residual!r}{nearest(self.residual, PATHWAYS)}; "
                                        f"known: {', '.join(PATHWAYS)}")
        for name, known in (("delta_entries", ("changes", "recursive")), ("mhc_readout", ("sum", "learned"))):
            value = getattr(self, name)
            need(value in known, f"unknown {name}={value!r}{nearest(value, known)}; known: {', '.join(known)}")
        pathway = self.pathway_class
        if self.route_heads is None or not pathway.multi_head:
            self.route_heads = pathway.default_heads(self)
        need(self.route_heads >= 1 and self.d_model % self.route_heads == 0,
             f"route_heads must divide d_model, but d_model={self.d_model} and route_heads={self.route_heads}")
        if self.sites_per_block is None:
            self.sites_per_block = pathway.min_sites_per_block
        need(self.sites_per_block >= pathway.min_sites_per_block,
             f"residual={self.residual!r} needs sites_per_block >= {pathway.min_sites_per_block}, "
             f"not {self.sites_per_block}{pathway.why_min_sites}")

    @property
    def pathway_class(self):
        return PATHWAYS[self.residual]

    @classmethod
    def of_checkpoint(cls, state):
        """The config of the model in a checkpoint's dict."""
        return cls(**{f.name: state["config"][f.name] for f in fields(cls) if f.name in state["config"]})


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
    starts_as_add = None                  # fields of ModelConfig with which the model starts as with `add`, bit for bit in fp32
    min_sites_per_block = 1
    why_min_sites = ""
    static = ()                           # names of parameters that never decay

    @staticmethod
    def default_heads(config):
        return 1

    @staticmethod
    def rungs(config):
        """Names of the route_kernels.RUNGS that can serve it."""
        return tuple(route_kernels.RUNGS)

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
        """Optimizer groups of the pathway's parameters. All but `static` ones decay, as in the MHAR recipe (its appendix I)."""
        groups = [{"name": "pathway", "params": [p for name, p in self.named_parameters() if name not in self.static]},
                  {"name": "pathway_static", "params": [getattr(self, name) for name in self.static], "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Forward FLOPs of all reads and writes of one token, residual additions not counted."""
        return 0

    def saved_per_site(self):
        """Multiples of C kept for backward per token and site by read and write: here the sublayer's input."""
        return 1

    def gradient_bank(self):
        """Elements a token, fp32, of the bank in which kernels=triton sums the gradients of sources."""
        return 0

    def sources(self, site):
        """Names of the sources that the read at `site` chooses from."""
        return ["running sum"]

    def closes_block(self, site):
        """Does the output of `site` complete a depth block?"""
        return False


class Add(Pathway):
    """The plain residual: h <- h + f(h)."""
    starts_as_add = {}

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
    reads_out = True                      # is the readout a read of its own?

    def __init__(self, config):
        super().__init__(config)
        rows = self.n_site + self.reads_out
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

    def gradient_bank(self):
        return (self.n_site // self.sites_per_block + 1) * len(self.key_stream) * self.gain.shape[-1]

    def flops_per_token(self):
        # per source and channel: mean square, logit and mix, each one multiply-add
        return sum(6 * self.gain.shape[-1] * len(self.sources(site)) for site in range(1, len(self.gain)))


class MHAR(AttnRes):
    """
    Multi-Head Attention Residuals (arXiv 2607.27230, eq. 3): AttnRes with `route_heads` heads, each with its own softmax
    over depth for its own slice of channels. The parameters are AttnRes's; with one head it is AttnRes.
    """
    multi_head = True

    @staticmethod
    def default_heads(config):
        return config.n_kv_head                                    # the setting of the paper's section 3.1


class Delta(AttnRes):
    """
    Delta Attention Residuals (arXiv 2605.18855): the plain residual, and each site reads beside it what earlier blocks
    changed,

        h <- h + y                                     y = f(h + g a),  a = depth attention over the sources of the site

    The sources are the embedding and the *changes*, the summed outputs of each closed depth block; with one site a block,
    each output. The open block is no source, site 0 reads h alone, and the readout is h. Several heads are MHAR's
    (its section 3.3), g = 1 unless `delta_gate`. Queries start at zero, gains at one.

    delta_entries="recursive" does as the released code of both papers: an entry is h minus the previous *entry*, which
    gives E, D1, E + D2, D1 + D3, ... for changes D_k and embedding E, and it joins one site later, after the first read of
    the next block. The papers' texts describe true changes.

    delta_gate adds for each site a scalar gate g and a null source of its own, both starting at zero (MHAR's conversion of
    trained models): the model starts as the one without this pathway, bit for bit in fp32. Site 0 reads its null source.
    """
    multi_head = True
    starts_as_add = {"delta_gate": True}
    reads_out = False

    @staticmethod
    def rungs(config):
        plain = config.sites_per_block == 1 and config.delta_entries == "changes" and not config.delta_gate
        return ("reference", "lean", "triton") if plain else ("reference", "lean")

    def __init__(self, config):
        super().__init__(config)
        self.recursive = config.delta_entries == "recursive"
        rows, C = self.gain.shape
        self.gate = nn.Parameter(torch.zeros(rows, 1)) if config.delta_gate else None      # FSDP refuses 0-dim parameters
        self.null = nn.Parameter(torch.zeros(rows, C)) if config.delta_gate else None

    def init_weights(self, generator):
        super().init_weights(generator)
        for p in [] if self.gate is None else (self.gate, self.null):
            nn.init.zeros_(p)

    def start(self, x):
        history, block = super().start(x)
        return *history.read(0), history, block                    # h, the sources, the sum of the open block

    def read(self, state, site):
        h, history, _ = state
        null = None if self.gate is None else (self.null[site].to(h.dtype).expand_as(h),)
        if site == 0:                                              # it has one source, or none
            if self.recorder is not None:
                self.recorder.append(history.weights(site))
            return h if null is None else h + self.gate[site].to(h.dtype) * null[0], None
        (a,) = self.mixes((history, null), site)
        return h + (a if null is None else self.gate[site].to(h.dtype) * a), None

    def write(self, state, y, site, carry):
        h, history, block = state
        if not self.recursive:
            history, block = super().write((history, block), y, site, carry)
        elif self.closes_block(site - 1):
            history.append((h - history.closed[-1][0],))
        return h + y, history, block

    def closes_block(self, site):
        return super().closes_block(site) and 0 <= site < self.n_site - 1                  # nobody reads the last block

    def readout(self, state):
        return state[0]

    def sources(self, site):
        if site == self.n_site:
            return ["running sum"]
        if site == 0:
            return ["embedding" if self.gate is None else "null"]
        closed = [name for name in super().sources(site - self.recursive) if not name.startswith("open")]
        return closed + ["null"] * (self.gate is not None)


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
        return 2 * super().flops_per_token() + 2 * self.gate_weight.numel()


class DARSelfKV(DAR):
    """Ablation: each stream's own entries are its keys (DAR's Table 4)."""
    key_stream, value_stream = (0, 1), (0, 1)


class DARCrossV(DAR):
    """Ablation: the roles of the streams exchanged, own keys choose the other stream's values (our reading of Table 4)."""
    key_stream, value_stream = (0, 1), (1, 0)


class DARFixed(DAR):
    """Ablation: fixed roles, stream 0 gives the keys and stream 1 the values of both reads."""
    key_stream, value_stream = (0, 0), (1, 1)


class MultiStream(Pathway):
    """
    What hyper-connections have in common: n streams x_1 .. x_n, all starting as the embedding, held as one tensor
    (B, T, n, C). A site reads one mix of them and writes to all:

        h    = sum_j pre_j x_j                         what the sublayer sees
        x_i <- sum_j res_ij x_j + post_i f(h)

    A subclass says where these come from: maps(streams, site) gives pre (.., n), post (.., n) and res (.., n, n), the leading
    axes being (B, T) or none. They and the mixing are fp32 or wider.
    """

    def __init__(self, config):
        super().__init__(config)
        self.n, self.d_model = config.n_stream, config.d_model

    def start(self, x):
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.n, x.shape[-1])

    def read(self, streams, site):
        wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
        pre, post, res = self.maps(wide, site)
        mixed = torch.cat((pre.unsqueeze(-2), res), dim=-2) @ wide                         # (B, T, 1 + n, C)
        return mixed[..., 0, :].to(streams.dtype), (mixed[..., 1:, :], post)

    def write(self, streams, y, site, carry):
        mixed, post = carry
        return (mixed + post.unsqueeze(-1) * y.unsqueeze(-2)).to(y.dtype)

    def readout(self, streams):
        return streams.sum(-2)

    def sources(self, site):
        return [f"stream {i}" for i in range(self.n)]

    def saved_per_site(self):
        return 1 + 2 * self.n + self.n                             # h; fp32 streams; y for post, streams for their norm

    def flops_per_token(self):
        n, C = self.n, self.d_model                                # the mix and the write; per weight, one multiply-add
        weights = sum(p.numel() * (n if p.shape[-1] == C else 1) for name, p in self.named_parameters() if "weight" in name)
        return self.n_site * 2 * n * C * (n + 2) + 2 * weights


class HCStatic(MultiStream):
    """
    The MHAR paper's "hyper-connections" (the control of its Table 1), a simplified static form: pre = softmax(alpha), res
    and post are parameters, and the readout is the mean of the streams. alpha starts at N(0, 0.02), res at I + N(0, 0.02),
    post at (1, 0, .. 0) + N(0, 0.02). Not the HC paper's: that is `hc`.
    """

    def __init__(self, config):
        super().__init__(config)
        self.alpha = nn.Parameter(torch.zeros(self.n_site, self.n))
        self.res = nn.Parameter(torch.zeros(self.n_site, self.n, self.n))
        self.post = nn.Parameter(torch.zeros(self.n_site, self.n))

    def init_weights(self, generator):
        for p in (self.alpha, self.res, self.post):
            nn.init.normal_(p, std=0.02, generator=generator)
        self.res += torch.eye(self.n)
        self.post[:, 0] += 1

    def maps(self, streams, site):
        alpha, post, res = (p[site].to(streams.dtype) for p in (self.alpha, self.post, self.res))
        return alpha.softmax(-1), post, res

    def readout(self, streams):
        return streams.mean(-2)


class HC(MultiStream):
    """
    Dynamic hyper-connections (arXiv 2409.19606, eqs. 10-13). With X = gain * Norm(stream), for each stream by itself,

        pre  = A_m + s_a tanh(X W_m)          post = B + s_b tanh(X W_b)          res = (A_r + s_a tanh(X W_r))^T

    All W start at zero, s_a and s_b at 0.01, B at one, A_r at I and A_m of site k at one for stream k mod n, else zero
    (eq. 14): the model starts as the plain residual, its final state n times as large, which the final norm undoes. A_m, B
    and A_r do not decay (section 4). Norm is RMSNorm (the paper's pseudocode has LayerNorm), and the paper's rescaling of
    output weights by sqrt(n) is left out, so that every pathway starts with the same body.
    """
    static = "static_pre", "static_post", "static_res"

    def __init__(self, config):
        super().__init__(config)
        n, C = self.n, config.d_model
        self.gain = nn.Parameter(torch.ones(self.n_site, C))
        self.weight = nn.Parameter(torch.zeros(self.n_site, n + 2, C))                     # rows: W_m, W_r (n), W_b
        self.scale = nn.Parameter(torch.zeros(self.n_site, 2))                             # s_a, s_b
        self.static_pre = nn.Parameter(torch.zeros(self.n_site, n))                        # A_m
        self.static_res = nn.Parameter(torch.zeros(self.n_site, n, n))                     # A_r, [from, to]
        self.static_post = nn.Parameter(torch.zeros(self.n_site, n))                       # B

    def init_weights(self, generator):
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.scale, 0.01)
        nn.init.ones_(self.static_post)
        self.static_res.copy_(torch.eye(self.n))
        self.static_pre.copy_(torch.eye(self.n)[torch.arange(self.n_site) % self.n])

    def maps(self, streams, site):
        gain, weight, scale, pre, res, post = (p[site].to(streams.dtype) for p in (
            self.gain, self.weight, self.scale, self.static_pre, self.static_res, self.static_post))
        x = F.rms_norm(streams, gain.shape, gain, self.norm_eps)
        from_m, from_r, from_b = F.linear(x, weight).tanh().split((1, self.n, 1), dim=-1)  # (B, T, n, ..)
        return (pre + scale[0] * from_m.squeeze(-1), post + scale[1] * from_b.squeeze(-1), (res + scale[0] * from_r).mT)


class MHC(MultiStream):
    """
    Manifold-constrained hyper-connections (arXiv 2512.24880, eqs. 7-9). With x' the RMSNorm of all streams as one vector of
    n C channels (one statistic, no weight),

        pre = sigmoid(a_1 P_1 x' + b_1)     post = 2 sigmoid(a_2 P_2 x' + b_2)     res = Sinkhorn(a_3 P_3 x' + b_3)

    and Sinkhorn (exp, then 20 times columns and rows divided by their sums) makes res doubly stochastic. The three a start
    at 0.01. Initial P and b and the readout are not stated; ours: P and b_2 zero (post = 1); b_3 = 6 I (a stream keeps 99 %
    of itself); b_1 of site k is 3 for stream k mod n and -3 for the others, as in HC, because streams with equal b_1
    would stay equal for ever; b does not decay, as in HC. So the model starts as the plain residual, up to norm_eps.

    mhc_readout="sum" adds the streams up (HC); "learned" weighs them by sigmoid(a P x' + b), P and b zero (DeepSeek-V4).
    """
    b_pre, b_res = 3.0, 6.0

    def __init__(self, config):
        super().__init__(config)
        n, C = self.n, config.d_model
        self.sizes = n, n, n * n                                                           # pre, post, res row by row
        self.weight = nn.Parameter(torch.zeros(self.n_site, sum(self.sizes), n * C))       # P
        self.bias = nn.Parameter(torch.zeros(self.n_site, sum(self.sizes)))                # b
        self.scale = nn.Parameter(torch.zeros(self.n_site, 3))                             # a
        self.learned = config.mhc_readout == "learned"
        self.static = ("bias", "readout_bias") if self.learned else ("bias",)
        if self.learned:
            self.readout_weight = nn.Parameter(torch.zeros(n, n * C))
            self.readout_bias = nn.Parameter(torch.zeros(n))
            self.readout_scale = nn.Parameter(torch.zeros(1))

    def init_weights(self, generator):
        for p in self.parameters():
            nn.init.zeros_(p)
        nn.init.constant_(self.scale, 0.01)
        pre, _, res = self.bias.split(self.sizes, dim=-1)
        pre.copy_(self.b_pre * (2 * torch.eye(self.n)[torch.arange(self.n_site) % self.n] - 1))
        res.copy_(self.b_res * torch.eye(self.n).flatten())
        if self.learned:
            nn.init.constant_(self.readout_scale, 0.01)

    def normed(self, streams):
        return F.rms_norm(x := streams.flatten(-2), x.shape[-1:], eps=self.norm_eps)       # (B, T, n C)

    def maps(self, streams, site):
        weight, bias, scale = (p[site].to(streams.dtype) for p in (self.weight, self.bias, self.scale))
        raw = F.linear(self.normed(streams), weight).split(self.sizes, dim=-1)
        pre, post, res = (a * r + b for a, r, b in zip(scale, raw, bias.split(self.sizes)))
        return pre.sigmoid(), 2 * post.sigmoid(), sinkhorn(res.unflatten(-1, (self.n, self.n)))

    def readout(self, streams):
        if not self.learned:
            return super().readout(streams)
        wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
        weight, bias, scale = (p.to(wide.dtype) for p in (self.readout_weight, self.readout_bias, self.readout_scale))
        pre = (scale * F.linear(self.normed(wide), weight) + bias).sigmoid()
        return (pre.unsqueeze(-1) * wide).sum(-2).to(streams.dtype)


def sinkhorn(logits, iterations=20):
    """(.., n, n) -> a doubly stochastic matrix (mHC eqs. 8-9): exp, then columns and rows in turn divided by their sums."""
    logits = logits.movedim((-2, -1), (0, 1)).contiguous()                # sums over leading axes are fast
    for _ in range(iterations):
        logits = logits.log_softmax(0).log_softmax(1)
    return logits.exp().movedim((0, 1), (-2, -1))


PATHWAYS = {"add": Add, "attnres": AttnRes, "mhar": MHAR, "delta": Delta,
            "dar": DAR, "dar_selfkv": DARSelfKV, "dar_crossv": DARCrossV, "dar_fixed": DARFixed,
            "hc_static": HCStatic, "hc": HC, "mhc": MHC}


# ----------------------------------------------------------------------------------------------------------------------
# the model

class GPT(nn.Module):
    """
    config     ModelConfig
    init_seed  seed of the initial weights; the body's are drawn first and do not depend on the pathway
    kernels    how depth is read: a name of route_kernels.RUNGS; `route_kernels.choose` knows which runs where
    Attributes to set before use: `compute_dtype` (None = the weights' own), `checkpoint` (True = keep only the input of each
    sublayer and run it again in backward) and `eot` (an end-of-text id: no token sees what stands before the last one of
    these; None = documents of a window see each other).
    """

    def __init__(self, config, init_seed=0, kernels="lean"):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        sparse_from = config.moe_n_dense if config.moe_n_expert else config.n_layer
        self.sublayers = nn.ModuleList(cls(config) for i in range(config.n_layer)
                                       for cls in (Attention, MoE if i >= sparse_from else FFN))
        self.pathway = config.pathway_class(config)
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
        if kernels not in self.pathway.rungs(config):
            raise ConfigError(f"kernels={kernels}: this form of residual={config.residual!r} has no such kernels; "
                              "use --kernels=lean")
        self.kernels = kernels
        self.pathway.rung = route_kernels.RUNGS[kernels]
        self.compute_dtype = None
        self.checkpoint = False
        self.eot = None
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
            elif name.endswith(("embed.weight", "proj.weight", "router.weight", "lm_head.weight")):
                nn.init.normal_(p, std=self.config.init_std, generator=generator)
            else:
                raise AssertionError(f"no rule to initialise {name}")
        self.pathway.init_weights(torch.Generator().manual_seed(seed + 1))

    def hidden(self, idx, cache=None, aux=None):
        """Final hidden states (B, T, C), normed, of token ids idx (B, T). `aux` (a dict) receives what MoE puts there."""
        start = 0 if cache is None else cache.length
        stop = start + idx.shape[1]
        if stop > self.config.seq_len:
            raise ConfigError(f"{stop} tokens do not fit the context of {self.config.seq_len} (seq_len)")
        cos, sin, mask = self.cos[start:stop], self.sin[start:stop], None
        if cache is not None and cache.pad is not None or cache is None and self.eot is not None:
            mask, position = documents(idx, self.eot) if cache is None else padded(cache.pad, start, stop)
            cos, sin = self.cos[position].unsqueeze(1), self.sin[position].unsqueeze(1)
        ctx = Context(cos, sin, mask, cache, aux)
        x = self.dropout(self.embed(idx))
        few = cache is not None and idx.shape[1] == 1 and not torch.is_grad_enabled()
        with self.reading(route_kernels.SAMPLING if few else self.pathway.rung):
            state = self.pathway.start(x if self.compute_dtype is None else x.to(self.compute_dtype))
            for site, f in enumerate(self.sublayers):
                h, carry = self.pathway.read(state, site)
                y = checkpoint(f, h, ctx, use_reentrant=False) if self.checkpoint and self.training else f(h, ctx)
                state = self.pathway.write(state, y, site, carry)
            h = self.pathway.readout(state)
        if cache is not None:
            cache.length = stop
        return self.norm(h)

    @contextlib.contextmanager
    def reading(self, rung):
        """Inside, depth is read with this Rung of route_kernels."""
        own, self.pathway.rung = self.pathway.rung, rung
        try:
            yield
        finally:
            self.pathway.rung = own

    def forward(self, idx, targets=None, reduction="mean", z_loss=0.0):
        """
        idx (B, T) token ids -> (logits (B, T, V), None), or with targets (B, T; -100 = not scored) -> (None, loss): the
        logits of a whole batch are never made then. The loss is in nats, the mean over scored tokens, or one a token
        with reduction="none" (B, T).
        """
        h = self.hidden(idx, aux=(aux := {}))
        if targets is None:
            return self.lm_head(h), None
        loss = token_losses(h.flatten(0, 1), self.lm_head.weight, targets.flatten(), z_loss)
        if reduction == "none":
            return None, loss.view_as(targets)
        loss = loss.sum() / (targets >= 0).sum()
        return None, loss + sum(a - a.detach() for a in aux.values())      # as with z_loss, in the gradient alone

    @torch.no_grad()
    def depth_weights(self, idx):
        """
        The weights of every read of idx (B, T): a list of (streams, N, B, T, H), one entry a site and one for the readout
        (which delta has not), summing to 1 over N. Empty for a pathway that does not attend over depth. Without dropout.
        """
        self.pathway.recorder = found = []
        was_training = self.training
        try:
            with self.reading(route_kernels.RUNGS["reference"]):
                self.eval().hidden(idx)
        finally:
            self.pathway.recorder = None
            self.train(was_training)
        return found

    # ---- sampling

    def stream(self, idx, max_new_tokens, **settings):
        """Yield up to max_new_tokens tensors (B,), the tokens that follow idx (B, T). `sampling.stream` has the settings."""
        return sampling.stream(self, idx, max_new_tokens, **settings)

    def generate(self, idx, max_new_tokens, **settings):
        """idx (B, T) followed by max_new_tokens tokens, (B, T + max_new_tokens)."""
        return torch.cat((idx, *(token[:, None] for token in self.stream(idx, max_new_tokens, **settings))), dim=1)

    # ---- counts and descriptions

    def param_groups(self):
        """Optimizer groups: the body's parameters, and the pathway's own."""
        body = [p for name, p in self.named_parameters() if not name.startswith("pathway.")]
        return [{"name": "body", "params": body}, *self.pathway.param_groups()]

    def num_params(self):
        """All parameters, tied ones once."""
        return sum(p.numel() for p in self.parameters())

    def num_active_params(self):
        """Those that take part in one token: without the experts it does not take."""
        return self.num_params() - sum(f.idle_params() for f in self.sublayers if isinstance(f, MoE))

    def balance_experts(self, total):
        """
        After each optimizer step. `total` sums a tensor over all processes. -> the largest load of an expert in the batch over
        the mean load of its layer, the worst of all layers; None without experts.
        """
        sparse = [f for f in self.sublayers if isinstance(f, MoE)]
        if not sparse:
            return None
        loads = total(torch.stack([f.load for f in sparse]))               # (layers, E)
        for f, load in zip(sparse, loads):
            f.balance(load)
        return (loads.amax(-1) / loads.mean(-1)).amax()

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
        active = f" ({self.num_active_params():,} active a token)" if c.moe_n_expert else ""
        lines = [f"residual={c.residual}: {c.n_layer} layers, {p.n_site} sites, {self.num_params():,} parameters{active}, "
                 f"of them {p.num_params():,} routing; {c.route_heads} routing head(s), {c.sites_per_block} site(s) a depth block"]
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
        self.fill_tables()

    def fill_tables(self):
        """What no checkpoint holds, of a model that was made on the meta device."""
        self.cos, self.sin = (table.to(self.embed.weight.device) for table in rope_tables(self.config))
        for f in self.sublayers:
            if isinstance(f, MoE):
                f.load = torch.zeros_like(f.bias)

    @classmethod
    def from_checkpoint(cls, path, weights="model", kernels="lean"):
        """The model of a checkpoint of train.py, in evaluation mode, on the CPU. `weights` is "model" or "ema"."""
        state = path if isinstance(path, dict) else load_checkpoint(path)
        if weights not in state:
            raise ConfigError(f"the checkpoint has no {weights!r} weights; it has {', '.join(state)}")
        with torch.device("meta"):
            model = cls(ModelConfig.of_checkpoint(state), kernels=kernels)
        model.load_weights(state["model"] | state[weights])        # averages are of parameters only
        return model.eval()
