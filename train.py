"""
Pretraining. One process, or many under torchrun (DDP or FSDP):

    python train.py configs/demo.py --key=value ...
    torchrun --standalone --nproc_per_node=8 train.py configs/mhar_1b.py
    python train.py configs/mhar_1b.py --dry_run                 print what would run, allocate nothing

A config is a Python file of assignments to the fields of TrainConfig (below) and ModelConfig (model.py); a second file
changes the first (mhar_1b.py web.py). The run writes config.json, run.json, log.jsonl and ckpt/ to out_dir, and goes on from
ckpt/latest.pt when started again.

What a run computes is a function of its config alone. The data order follows from (seed, step), dropout from (seed, step,
sequence): nothing random is carried from step to step, so a run stopped anywhere and resumed equals the undisturbed one,
the same config gives the same batches on any number of processes, and evaluation and logging change nothing.
"""

import ast
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import typing
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from body import LOGITS_AT_ONCE, MoE
from checkpoints import MOMENTS, file_of, pack_tokenizer, read, restore, save_checkpoint, write_atomically
from errors import ConfigError, DataError, RunError, nearest
from eval import batch, choose_kernels, val_windows, window_losses
from model import GPT, ModelConfig
from prepare_data import TokenBin
from processes import Processes, choose_device
from route_kernels import RUNGS


@dataclass
class TrainConfig:
    data_dir: str = "data/demo"           # made by prepare_data.py
    out_dir: str | None = None            # None = out/NAME for config file NAME.py, out/NAME_OTHER for two
    init_from: str | None = None          # checkpoint whose weights a new run starts with (convert.py makes some of others' models)
    max_steps: int = 20_000               # optimizer steps; 0 = evaluate only
    batch_tokens: int = 131_072           # tokens of one optimizer step, over all processes
    micro_batch_size: int = 8             # sequences a process runs at once; the rest is gradient accumulation
    learning_rate: float = 5e-4           # peak
    pathway_learning_rate: float | None = None                            # peak, of the pathway's parameters; None = the same
    min_lr_ratio: float = 0.1             # learning rate at the last step / peak
    warmup_steps: int = 1000              # linear
    schedule: str = "cosine"              # a name of SCHEDULES
    decay_fraction: float = 0.2           # of the steps, at the end: where wsd decays
    weight_decay: float = 0.1
    decay: str = "all"                    # what decays: all (the MHAR recipe), or matrices (no embedding, norm, nor pathway)
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0                # global norm; 0 = off
    z_loss: float = 0.0
    ema_decay: float = 0.0                # > 0 keeps, evaluates and saves an exponential moving average of the weights
    eval_interval: int = 500              # steps
    eval_tokens: int | None = None        # of the val split, evenly spread windows; None = all of it
    save_interval: int = 1000             # steps
    keep_last: int = 2                    # numbered checkpoints kept, beside best.pt and latest.pt
    log_interval: int = 10                # steps
    doc_mask: bool = False                # attention ends at document borders, and positions start anew
    seed: int = 1337                      # data order and dropout
    init_seed: int = 1337                 # weights
    device: str = "auto"                  # auto, cpu, cuda, mps
    dtype: str = "auto"                   # of activations: auto (bfloat16 on GPUs that have it), float32, bfloat16
    param_dtype: str = "float32"          # of weights and optimizer state; bfloat16 is the MHAR recipe
    compile: bool | None = None           # torch.compile of the sublayers; None = on CUDA only
    checkpoint: str = "none"              # activation checkpointing: none, sublayer
    parallel: str = "ddp"                 # of processes under torchrun: ddp, or fsdp (each holds a part of every tensor)
    kernels: str = "auto"                 # how depth is read: auto (the fastest that runs), triton, lean, reference
    resume: str = "auto"                  # auto = go on where out_dir stopped; never; or the path of a checkpoint
    wandb: bool = False

    def __post_init__(self):
        choices = {"schedule": SCHEDULES, "decay": ("all", "matrices"), "device": ("auto", "cpu", "cuda", "mps"),
                   "dtype": ("auto", "float32", "bfloat16"), "param_dtype": ("float32", "bfloat16"),
                   "checkpoint": ("none", "sublayer"), "parallel": ("ddp", "fsdp"), "kernels": ("auto", *RUNGS)}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"unknown {name}={value!r}{nearest(value, known)}; known: {', '.join(known)}")
        for name in ("batch_tokens", "micro_batch_size", "eval_interval", "save_interval", "keep_last", "log_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_steps", "warmup_steps", "weight_decay", "grad_clip", "z_loss"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], not {getattr(self, name)}")
        for name in ("beta1", "beta2", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        for name in ("learning_rate", "pathway_learning_rate"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")


# ----------------------------------------------------------------------------------------------------------------------
# configuration

TYPES = {name: hint for cls in (TrainConfig, ModelConfig) for name, hint in typing.get_type_hints(cls).items()}


def load_config(argv):
    """[config files, --key=value ...] -> (TrainConfig, ModelConfig). A later file wins, and the command line over all."""
    for arg in argv:
        if arg.startswith("--") and "=" not in arg:
            raise ConfigError(f"write {arg}=VALUE")
    files = [arg for arg in argv if not arg.startswith("--")]
    if not files:
        raise ConfigError("give a config file: python train.py configs/demo.py --key=value ...")
    paths, values = [find_config(name) for name in files], {}
    for path in paths:
        for name, value in read_config(path).items():
            values[name] = checked(name, value, f" in {path}")
    for arg in argv:
        if arg.startswith("--"):
            name, _, text = arg[2:].partition("=")
            values[name] = checked(name, parsed(name, text), "")
    config = TrainConfig(**{f.name: values[f.name] for f in fields(TrainConfig) if f.name in values})
    if config.out_dir is None:
        config.out_dir = "out/" + "_".join(path.stem for path in paths)
    if config.init_from is not None and (start := starting_point(config)[0]).exists():
        values = read(start)["config"] | values                           # what is not stated is as in the checkpoint
    return config, ModelConfig(**{f.name: values[f.name] for f in fields(ModelConfig) if f.name in values})


def find_config(name):
    """configs/mhar_1b.py also answers to config/mhar_1b.py, mhar_1b.py and mhar_1b."""
    home = Path(__file__).parent / "configs"
    for path in (Path(name), home / Path(name).with_suffix(".py").name):
        if path.is_file():
            return path
    known = sorted(p.stem for p in home.glob("*.py"))
    raise ConfigError(f"no config file {name}{nearest(Path(name).stem, known)}; known: {', '.join(known)}")


def read_config(path):
    """The assignments of a config file. It can import from the config files beside it."""
    sys.path.insert(0, str(path.parent))
    try:
        names = runpy.run_path(str(path))
    except Exception as e:
        raise ConfigError(f"{path} cannot be run: {type(e).__name__}: {e}") from None
    finally:
        sys.path.remove(str(path.parent))
    return {name: v for name, v in names.items() if not name.startswith("_") and not isinstance(v, type(sys))}


def parsed(name, text):
    """A command-line value: a Python literal, true/false in any spelling of case, or the text itself."""
    if TYPES.get(name) is str or text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text.strip("'\""))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def checked(name, value, where):
    """`value` as the declared type of the field `name`: an int may serve as float, and a whole float such as 1e5 as int."""
    if name not in TYPES:
        raise ConfigError(f"unknown key {name!r}{where}{nearest(name, TYPES)}")
    options = typing.get_args(TYPES[name]) or (TYPES[name],)
    if type(value) in options or value is None and type(None) in options:
        return value
    if float in options and type(value) is int:
        return float(value)
    if int in options and type(value) is float and value.is_integer():
        return int(value)
    if str in options and type(value) in (int, float):                        # --out_dir=1
        return str(value)
    expected = " or ".join("None" if t is type(None) else t.__name__ for t in options)
    raise ConfigError(f"{name}={value!r}{where}: expected {expected}, not {type(value).__name__}")


# ----------------------------------------------------------------------------------------------------------------------
# schedules and data order: functions of the step alone

SCHEDULES = {                             # share of the way from peak down to min_lr at progress p in (0, 1] past warmup
    "cosine": lambda p, c: (1 - math.cos(math.pi * p)) / 2,
    "linear": lambda p, c: p,
    "1-sqrt": lambda p, c: math.sqrt(p),
    "wsd": lambda p, c: max(0.0, 1 - (1 - p) / c.decay_fraction) if c.decay_fraction else 0.0,
    "constant": lambda p, c: 0.0,
}


def learning_rate(step, config):
    """Of optimizer step 1 .. max_steps: linear warmup to the peak at warmup_steps, then down to min_lr at max_steps."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    p = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
    return config.learning_rate * (1 - (1 - config.min_lr_ratio) * SCHEDULES[config.schedule](p, config))


def mixed(*values):
    """A 64-bit hash of integers, the seed of whatever they name."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


def shuffled(i, n, key):
    """Where index i (array of int64 < n) goes in a pseudo-random permutation of range(n): a 4-round Feistel network on
    the next even number of bits, walked until it lands below n. Needs no memory, whatever n."""
    half = max(1, (int(n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    rounds = [np.uint64(mixed(key, r) | 1) for r in range(4)]
    x = np.asarray(i, dtype=np.uint64)
    outside = np.ones(x.shape, dtype=bool)
    while outside.any():
        left, right = x >> np.uint64(half), x & mask
        for k in rounds:
            h = (right + k) * np.uint64(0x9E3779B97F4A7C15)
            h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((h >> np.uint64(40)) & mask)
        x = np.where(outside, (left << np.uint64(half)) | right, x)
        outside = x >= n
    return x.astype(np.int64)


def windows_of_step(step, n_windows, batch_size, seed):
    """Window numbers of optimizer step 1, 2, ..., (batch_size,): every window once an epoch, in a new order each epoch."""
    position = (step - 1) * batch_size + np.arange(batch_size)
    epoch = position // n_windows
    return np.concatenate([shuffled(position[epoch == e] % n_windows, n_windows, mixed(seed, int(e)))
                           for e in np.unique(epoch)])


# ----------------------------------------------------------------------------------------------------------------------
# what a resumed run may change

ARCHITECTURE = [f.name for f in fields(ModelConfig) if f.name not in ("dropout", "init_std", "query_init_std")]


def starting_point(config):
    """-> the checkpoint that a run goes on from, or that its weights come from, or None; and is it the former?"""
    latest = Path(config.out_dir) / "ckpt" / "latest.pt"
    if config.resume == "auto" and latest.exists():
        return latest, True
    if config.resume not in ("auto", "never"):
        return file_of(config.resume), True
    return None if config.init_from is None else file_of(config.init_from), False


def changes_since(state, config, path, going_on):
    """
    Refuse a checkpoint of another architecture, which a run of `config` cannot go on from, or start with;
    -> lines 'key: old -> new' of what else is different.
    """
    if going_on and not {"exp_avg", "shards"} & state.keys():
        raise ConfigError(f"{path} holds weights only, which a run cannot go on from: start a new one with --init_from={path}")
    old = state["config"]
    changed = [key for key in config if key in old and old[key] != config[key]]
    refused = [f"{key} ({old[key]} -> {config[key]})" for key in changed if key in ARCHITECTURE and (going_on or key != "seq_len")]
    if refused:
        remedy = "choose another --out_dir" if going_on else "convert.py makes a checkpoint of another pathway"
        raise ConfigError(f"{path} has another architecture: {', '.join(refused)}; {remedy}")
    return [f"{key}: {old[key]} -> {config[key]}" for key in changed]


# ----------------------------------------------------------------------------------------------------------------------
# parameters and precision


def cast_parameters(model, dtype):
    """Parameters become of dtype (a name); buffers, such as the bias that balances experts by small steps, stay fp32."""
    for p in model.parameters():
        p.data = p.data.to(getattr(torch, dtype))


def shard(model, device, world, dtype):
    """
    Fully sharded data parallel (torch's FSDP2): a process holds its part of every parameter, gradient and moment. Sublayers are
    gathered one at a time, already in the dtype they compute in; what must not lose precision (embedding, pathway, final
    norm, routers of experts) as it is. Gradients are summed in fp32.
    """
    settings = {"mesh": init_device_mesh(device.type, (world,)), "reshard_after_forward": True}
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for f in model.sublayers:
        if isinstance(f, MoE):
            fully_shard(f.router, **settings, mp_policy=exact)
        fully_shard(f, **settings, mp_policy=dataclasses.replace(exact, param_dtype=dtype))
    fully_shard(model, **settings, mp_policy=exact)
    register_fsdp_forward_method(model, "depth_weights")


def choose_dtype(name, device, has_bf16):
    """The compute dtype; has_bf16 says whether a GPU has bfloat16 arithmetic (compute capability 8.0 on)."""
    if name == "auto":
        return torch.bfloat16 if device == "cuda" and has_bf16 else torch.float32
    if name == "bfloat16" and device == "cuda" and not has_bf16:
        raise ConfigError("dtype=bfloat16, but this GPU has no bfloat16 arithmetic: use --dtype=float32")
    return getattr(torch, name)


PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}       # dense bf16, SXM


def peak_flops(device_name, dtype):
    """Of one GPU, or None where it is not known."""
    known = [peak for name, peak in PEAK_FLOPS.items() if name in device_name and "PCIe" not in device_name]
    return known[0] if known and dtype == torch.bfloat16 else None


# ----------------------------------------------------------------------------------------------------------------------
# evaluation


def evaluate(model, data, windows, config, processes):
    """Mean loss over windows of a TokenBin: the same number to the bit for every number of processes."""
    losses = window_losses(model, data, windows, config.micro_batch_size, processes.device, processes.rank, processes.world)
    return processes.sum(losses).mean().item()


@torch.no_grad()
def routing_entropy(model, idx):
    """Mean over sites, heads and tokens of idx of the entropy of the depth weights, over its maximum log N; None for a
    pathway that does not attend over depth."""
    found = [-(w * w.clamp_min(1e-30).log()).sum(1).mean() / math.log(w.shape[1])
             for w in model.depth_weights(idx) if w.shape[1] > 1]
    return torch.stack(found).mean().item() if found else None


# ----------------------------------------------------------------------------------------------------------------------
# the run


def accumulation(config, seq_len, world):
    """Passes of micro_batch_size sequences that each process makes for one optimizer step."""
    at_once = config.micro_batch_size * seq_len * world
    if config.batch_tokens % at_once:
        near = max(1, round(config.batch_tokens / at_once)) * at_once
        raise ConfigError(f"batch_tokens={config.batch_tokens} is no multiple of micro_batch_size * seq_len * processes = "
                          f"{config.micro_batch_size} * {seq_len} * {world} = {at_once}; the nearest is {near}")
    return config.batch_tokens // at_once


def optimizer_groups(model, config):
    """
    The parameters in groups of one learning rate (config.learning_rate times `lr_share`) and one decay. With decay="matrices"
    it is the matrices of sublayers and an lm_head of its own that decay (MHAR, section 3.3: not embeddings and norms; its
    code: not the pathway).
    """
    groups = []
    for group in model.param_groups():
        own = config.pathway_learning_rate if group["name"] != "body" else None
        group = group | {"lr_share": (own or config.learning_rate) / config.learning_rate}
        if config.decay == "matrices":
            matrices = [p for p in group["params"] if group["name"] == "body" and p.ndim > 1 and p is not model.embed.weight]
            ids = set(map(id, matrices))
            if matrices:
                groups.append(group | {"name": "matrices", "params": matrices})
            group |= {"params": [p for p in group["params"] if id(p) not in ids], "weight_decay": 0.0}
        groups.append(group)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters())), "groups must partition the parameters"
    return groups


def memory_estimate(config, model, world=1):
    """
    Bytes that each of `world` processes needs, by what: exact for weights, gradients and optimizer; an estimate for the rest,
    with bf16 activations and the fastest kernels, as on a GPU, unless the config says otherwise.
    """
    sharded = config.parallel == "fsdp" and world > 1
    held, size = model.num_params() / (world if sharded else 1), getattr(torch, config.param_dtype).itemsize
    act = 4 if config.dtype == "float32" else 2
    tokens = config.micro_batch_size * model.config.seq_len
    largest = max(sum(p.numel() for p in f.parameters()) for f in model.sublayers)
    root = model.num_params() - sum(p.numel() for p in model.sublayers.parameters())
    kernels = config.device != "cpu" and config.kernels in ("auto", "triton") and "triton" in model.pathway.rungs(model.config)
    return {"weights": held * size, "gradients": held * size, "AdamW moments": 2 * held * size,
            "EMA": 4 * held * (config.ema_decay > 0),
            "gathered (estimate)": ((size + 4) * root + 2 * (act + 4) * largest) * sharded,       # two sublayers at a time
            "activations (estimate)": act * tokens * model.saved_per_token(config.checkpoint == "sublayer"),
            "gradient bank (estimate)": 4 * tokens * model.pathway.gradient_bank() * kernels,
            "logits (estimate)": 3 * 4 * min(tokens * model.config.vocab_size, LOGITS_AT_ONCE)}


def commit():
    """Of the working tree, '+' added if it has changes; None outside git."""
    def git(*args):
        return subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True)
    try:
        head = git("rev-parse", "--short", "HEAD")
        return head.stdout.strip() + "+" * bool(git("status", "--porcelain", "-uno").stdout) if head.returncode == 0 else None
    except OSError:
        return None


class Log:
    """log.jsonl (one object a line), a progress bar on a terminal and plain lines elsewhere, Weights & Biases on request."""

    def __init__(self, path, config, first, active, flat):
        self.path, self.max_steps, self.active, self.wandb = path, config.max_steps, active, None
        if not active:
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < first]
        write_atomically(path, lambda f: f.write("".join(kept).encode()))     # drop what the resumed run will do again
        self.bar = tqdm(total=config.max_steps, initial=first - 1, unit="step", disable=None, dynamic_ncols=True)
        if config.wandb:
            try:
                import wandb
            except ImportError:
                raise ConfigError("wandb=True needs the extra 'wandb': pip install -e .[wandb]") from None
            self.wandb = wandb.init(project="nanodepth", dir=path.parent, config=flat, resume="allow")

    def step(self):
        if self.active:
            self.bar.update()

    def write(self, record):
        if not self.active:
            return
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
        if self.wandb is not None:
            self.wandb.log(record, step=record["step"])
        shown = "  ".join(f"{name} {record[key]:{form}}" for key, name, form in
                          (("loss", "loss", ".4f"), ("val_loss", "val", ".4f"), ("val_loss_ema", "val(ema)", ".4f"),
                           ("lr", "lr", ".2e"), ("grad_norm", "grad", ".2f"), ("tokens_per_s", "tok/s", ",.0f"),
                           ("mfu", "mfu", ".1%")) if record.get(key) is not None)
        if self.bar.disable:
            print(f"step {record['step']}/{self.max_steps}  {shown}", flush=True)
        elif "val_loss" in record:
            self.bar.write(f"step {record['step']}/{self.max_steps}  {shown}")
        else:
            self.bar.set_postfix_str(shown, refresh=False)

    def close(self):
        if self.active:
            self.bar.close()
            if self.wandb is not None:
                self.wandb.finish()


def dry_run(config, model_config):
    """Print what the run would be; allocate nothing."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    passes = accumulation(config, model_config.seq_len, world)
    with torch.device("meta"):
        model = GPT(model_config)
    start, _ = starting_point(config)
    if start is not None and not start.exists():
        print(f"{start} is not there: the model is as the config says")
    print(model.describe())
    total = config.batch_tokens * config.max_steps
    print(f"{config.batch_tokens:,} tokens a step = {world} process(es) * {passes} pass(es) * {config.micro_batch_size} * "
          f"{model_config.seq_len}; {config.max_steps:,} steps, {total:,} tokens")
    print(f"{model.flops_per_token():.4g} FLOPs a token, {model.flops_per_token() * total:.4g} in all")
    need = memory_estimate(config, model, world)
    print("memory of a process: " + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in need.items() if size)
          + f"; {sum(need.values()) / 2**30:.2f} GiB")


def show(flat):
    width = max(map(len, flat))
    print("\n".join(f"  {name:{width}} = {value!r}" for name, value in flat.items()))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(__doc__ + "\n" + "\n".join(f"  --{f.name}={f.default!r}" for c in (TrainConfig, ModelConfig) for f in fields(c)))
        return
    only_show = "--dry_run" in argv
    config, model_config = load_config([arg for arg in argv if arg != "--dry_run"])
    flat = dataclasses.asdict(config) | dataclasses.asdict(model_config)
    if only_show:
        show(flat)
        return dry_run(config, model_config)

    device = choose_device(config.device)
    processes = Processes(device)
    run(config, model_config, flat, processes, argv)
    processes.close()


def run(config, model_config, flat, processes, argv):
    device, first_rank = processes.device, processes.rank == 0
    say = print if first_rank else lambda *args: None

    # ---- everything that can be refused is refused before the first step
    out_dir = Path(config.out_dir)
    latest = out_dir / "ckpt" / "latest.pt"
    start, going_on = starting_point(config)
    if latest.exists() and not (going_on and start.exists() and start.samefile(latest)):
        raise ConfigError(f"{out_dir} holds a run already: choose another --out_dir, or go on with --resume=auto")
    if processes.any(going_on) and not going_on:
        raise ConfigError(f"process {processes.rank} does not see {latest}, another does: out_dir must be on a shared disk")
    state = read(start) if start is not None else {}
    T, world = model_config.seq_len, processes.world
    passes = accumulation(config, T, world)
    train_data, val_data = TokenBin(config.data_dir, "train"), TokenBin(config.data_dir, "val")
    n_windows, fixed_windows = train_data.n_windows(T), val_windows(val_data, T, config.eval_tokens)
    for data in (train_data, val_data):
        if data.max_id >= model_config.vocab_size:
            raise ConfigError(f"{data.path} holds token id {data.max_id}, but vocab_size={model_config.vocab_size}: "
                              f"use --vocab_size={data.meta['tokenizer']['n_vocab']} or more")
    dtype = choose_dtype(config.dtype, device.type, device.type != "cuda" or torch.cuda.is_bf16_supported(False))
    tokenizer = train_data.tokenizer()
    changes = changes_since(state, flat, start, going_on) if state else []
    if state and not going_on and state["tokenizer"]["sha256"] != tokenizer.sha256:
        raise ConfigError(f"{start} has the tokenizer {state['tokenizer']['name']!r}, {config.data_dir} was made with another, "
                          f"{tokenizer.name!r}: prepare the data with the checkpoint's")
    if going_on and state["data"] != {"train": train_data.sha256, "val": val_data.sha256}:
        changes.append(f"data: other contents in {config.data_dir}")
    if first_rank:
        (out_dir / "ckpt").mkdir(parents=True, exist_ok=True)
        for stale in (out_dir / "ckpt").glob("*.tmp"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()

    # ---- model, optimizer, state
    sharded = config.parallel == "fsdp" and processes.control is not None
    # of a sharded model that gets its values from a checkpoint, no process ever holds more than its part
    with torch.device("meta") if sharded and state else contextlib.nullcontext():
        model = GPT(model_config, config.init_seed, choose_kernels(config.kernels, device, dtype, model_config))
    if not model.embed.weight.is_meta:
        model.to(device)
    cast_parameters(model, config.param_dtype)
    model.compute_dtype, model.checkpoint = dtype, config.checkpoint == "sublayer"
    model.eot = tokenizer.eot if config.doc_mask else None
    if sharded:
        shard(model, device, world, dtype)
    if model.embed.weight.is_meta:
        model.to_empty(device=device)
        model.fill_tables()
    if state and not going_on:
        restore(start, state, {"model": model.state_dict()})
    params = dict(model.named_parameters())
    groups = optimizer_groups(model, config)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-8,
                                  weight_decay=config.weight_decay, fused=True)
    for p in params.values():                                             # as AdamW would at its first step
        optimizer.state[p] = {"step": torch.zeros((), device=device)} | {name: torch.zeros_like(p) for name in MOMENTS}
    ema = {name: p.detach().to(torch.float32, copy=True) for name, p in params.items()} if config.ema_decay else {}
    done, best_loss, origin = 0, math.inf, {key: state[key] for key in state.keys() & {"origin"}}

    def tensors():
        """All that a run learns, by name (see checkpoints.py)."""
        learned = {"model": model.state_dict()} | {key: {name: optimizer.state[p][key] for name, p in params.items()}
                                                   for key in MOMENTS}
        return learned | {"ema": ema} if ema else learned

    if going_on:
        restore(start, state, tensors())
        done, best_loss = state["step"], state["best_val_loss"]
        for p in params.values():
            optimizer.state[p]["step"].fill_(done)
    if state:
        say("\n".join([f"resumed {start} after step {done}" if going_on else f"weights of {start}",
                       *(f"  changed {change}" for change in changes)]))
    del state                                                             # or its tensors stay for the whole run
    if config.compile or config.compile is None and device.type == "cuda":
        for f in model.sublayers:
            f.compile()
    wrapped = model
    if processes.control is not None and not sharded:
        wrapped = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None,
                                          broadcast_buffers=False, gradient_as_bucket_view=True)

    # ---- say what runs
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = peak_flops(name, dtype)
    if first_rank:
        show(flat)
        say(model.describe().splitlines()[0])
        say(f"kernels: {model.kernels}; {name}, compute {dtype}, weights {config.param_dtype}; {world} process(es)")
        say(f"{config.batch_tokens:,} tokens a step = {world} process(es) * {passes} pass(es) * {config.micro_batch_size} * {T}; "
            f"{n_windows:,} windows an epoch, {config.max_steps * config.batch_tokens / T / n_windows:.2f} epochs; "
            f"tokenizer {tokenizer.name}, ids below {tokenizer.n_vocab}")
        say(f"{model.flops_per_token():.4g} FLOPs a token; "
            + ", ".join(f"{g['name']}: {sum(p.numel() for p in g['params']):,}" for g in groups) + " parameters to optimize")
        size = sum(p.numel() * p.element_size() for p in model.parameters()) * (3 + bool(ema)) * (config.keep_last + 2)
        free = shutil.disk_usage(out_dir).free
        if free < size:
            say(f"warning: checkpoints may take {size / 2**30:.1f} GiB and {out_dir} has {free / 2**30:.1f} GiB free")
        write_atomically(out_dir / "config.json", lambda f: f.write(json.dumps(flat, indent=1).encode()))
        facts = {"command": argv, "commit": commit(), "python": sys.version.split()[0], "torch": torch.__version__,
                 "device": name, "processes": world, "kernels": model.kernels, "parameters": model.num_params(),
                 "routing_parameters": model.pathway.num_params(), "flops_per_token": model.flops_per_token()}
        write_atomically(out_dir / "run.json", lambda f: f.write(json.dumps(facts, indent=1).encode()))

    def validate():
        values = {"val_loss": evaluate(model, val_data, fixed_windows, config, processes)}
        if ema:
            with exchanged(params, ema):
                values["val_loss_ema"] = evaluate(model, val_data, fixed_windows, config, processes)
        x, _ = batch(val_data, fixed_windows[:1], T, device)
        return values | {"routing_entropy": routing_entropy(model, x)}

    def save(step, is_best):
        facts = {"step": step, "best_val_loss": best_loss, "config": flat,
                 "data": {"train": train_data.sha256, "val": val_data.sha256},
                 "tokenizer": pack_tokenizer(tokenizer)} | origin
        if first_rank or sharded:
            save_checkpoint(out_dir / "ckpt", facts, tensors(), is_best, config.keep_last,
                            processes.control if sharded else None, first_rank)

    # ---- the loop
    log = Log(out_dir / "log.jsonl", config, done + 1, first_rank, flat)
    if config.max_steps == 0:
        log.write({"step": 0} | validate())
    signals = Signals()
    clock, since = time.perf_counter(), done
    model.train()
    for step in range(done + 1, config.max_steps + 1):
        lr = learning_rate(step, config)
        windows = windows_of_step(step, n_windows, config.batch_tokens // T, config.seed)
        loss = 0.0
        for i in range(passes):
            part = i * world + processes.rank                             # which micro-batch of the step
            x, y = batch(train_data, windows[part * config.micro_batch_size:][:config.micro_batch_size], T, device)
            if model_config.dropout:
                torch.manual_seed(mixed(config.seed, step, part) % 2**63)
            last = i == passes - 1
            # FSDP sums over processes in every pass, as a whole gradient is what it cannot hold
            with contextlib.nullcontext() if last or wrapped is model else wrapped.no_sync():
                part_loss = wrapped(x, y, z_loss=config.z_loss)[1] / passes
                part_loss.backward()
            loss = loss + part_loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(params.values(), config.grad_clip or math.inf)
        if sharded:
            grad_norm = grad_norm.full_tensor()                           # of all parts
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_share"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        expert_load = model.balance_experts(processes.sum)
        if ema:
            torch._foreach_lerp_(parts(ema), [p.float() for p in parts(params)], 1 - config.ema_decay)
        log.step()

        stopping = processes.any(signals.received)
        is_last = step == config.max_steps
        evaluating = is_last or step % config.eval_interval == 0
        saving = is_last or stopping or step % config.save_interval == 0
        if not (evaluating or saving or step % config.log_interval == 0):
            continue
        loss, grad_norm = (processes.sum(loss.cpu()) / world).item(), grad_norm.item()      # waits for the device
        seconds = time.perf_counter() - clock
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunError(f"step {step}: loss {loss}, gradient norm {grad_norm}. Stopped; the last good checkpoint is "
                           f"{latest if latest.exists() else 'none'}. A lower --learning_rate or more --warmup_steps may help")
        speed = (step - since) * config.batch_tokens / seconds
        record = {"step": step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": step * config.batch_tokens,
                  "epoch": step * config.batch_tokens / T / n_windows, "tokens_per_s": speed,
                  "mfu": peak and speed * model.flops_per_token() / (peak * world), "memory_gb": memory_used(device)}
        if expert_load is not None:
            record["expert_load"] = expert_load.item()
        is_best = False
        if evaluating:
            record |= validate()
            is_best = record["val_loss"] < best_loss
            best_loss = min(best_loss, record["val_loss"])
        log.write(record)
        if saving or is_best:
            save(step, is_best)
        if stopping and not is_last:
            say(f"stopped by signal after step {step}; the same command goes on from here")
            break
        clock, since = time.perf_counter(), step                          # evaluation and saving are not timed
    signals.release()
    log.close()
    if done >= config.max_steps > 0:
        say(f"{out_dir} is at step {done} of {config.max_steps} already: nothing to do")
    processes.barrier()


class Signals:
    """Remembers SIGTERM and SIGINT, for the loop to act on between steps. A second one takes effect at once."""

    def __init__(self):
        self.received = False
        self.before = {number: signal.signal(number, self.receive) for number in (signal.SIGTERM, signal.SIGINT)}

    def receive(self, number, frame):
        self.received = True
        self.release()

    def release(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def parts(tensors):
    """What this process holds of tensors (name -> tensor or DTensor), without their graph."""
    return [t.detach().to_local() if isinstance(t, DTensor) else t.detach() for t in tensors.values()]


@contextlib.contextmanager
@torch.no_grad()
def exchanged(params, weights):
    """Inside, parameters (name -> parameter) have the values of `weights`, rounded to their dtype."""
    own = [p.clone() for p in parts(params)]
    torch._foreach_copy_(parts(params), parts(weights))
    try:
        yield
    finally:
        torch._foreach_copy_(parts(params), own)


def memory_used(device):
    """Peak memory in GB: of the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if sys.platform == "linux":                                           # getrusage's peak begins with that of the parent process
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9       # bytes on macOS


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError, RunError, OSError) as e:
        sys.exit(f"train.py: {e}")
