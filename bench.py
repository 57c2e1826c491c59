"""
Speed, memory and traffic, side by side in one run. CONFIG is one of configs/; any --key=value of a config works.

    python bench.py step CONFIG        whole training steps: tokens/s, ratio to the plain residual, memory
    python bench.py sample CONFIG      sampling with a cache: tokens/s, ratio to the plain residual and to no cache
    python bench.py kernels CONFIG     all depth reads of a model, forward and backward, without the rest: time and bytes
    python bench.py bytes CONFIG       every load and store of the kernels counted, by what it is for; needs no GPU

All but `bytes` go in rounds, in each of which everything runs once, in turn, so that a slow moment of the machine hits
all of it; a ratio is the median over rounds of (speed) / (speed of the first row in the same round), with the lowest and
highest. --json FILE puts the rows into FILE, beside those of other commands.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__" and sys.argv[1:2] == ["bytes"]:
    os.environ["TRITON_INTERPRET"] = "1"                                   # read when kernels are defined

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from errors import ConfigError
from eval import choose_kernels
from model import GPT, AttnRes
from processes import choose_device
from route_kernels import RUNGS, TritonHistory, choose, depth_read_reference, launched, tokens_of_program
from train import cast_parameters, choose_dtype, load_config

STATISTICS = {"median": statistics.median, "low": min, "high": max}


# ----------------------------------------------------------------------------------------------------------------------
# whole steps


class Memory(TorchDispatchMode):
    """Counts the storage of tensors that are made inside, on any device, `meta` too; `known` tensors are left out."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if torch.is_tensor(t) and (storage := t.untyped_storage())._cdata not in self.known:
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.alive())
        return out

    def alive(self):
        """Bytes that are still there."""
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        return sum(size for _, size in self.made.values())


def saved_bytes(model, x):
    """Bytes, parameters aside, that one forward of x (B, T) keeps for its backward."""
    with Memory([x, *model.parameters(), *model.buffers()]) as memory:
        loss = model(x, x)[1]                                              # it holds the graph
    return memory.alive() - loss.nbytes


class Step:
    """A model and its optimizer, ready to take training steps on random tokens."""

    def __init__(self, config, model_config):
        device = choose_device(config.device)
        self.device = torch.device(device)
        dtype = choose_dtype(config.dtype, device, device == "cuda" and torch.cuda.is_bf16_supported(False))
        self.model = GPT(model_config, config.init_seed, choose_kernels(config.kernels, device, dtype, model_config))
        cast_parameters(self.model.to(self.device), config.param_dtype)
        self.model.compute_dtype = dtype
        self.model.checkpoint = config.checkpoint == "sublayer"
        if config.compile or config.compile is None and device == "cuda":
            for f in self.model.sublayers:
                f.compile()
        self.optimizer = torch.optim.AdamW(self.model.param_groups(), lr=config.learning_rate, fused=True)
        shape = config.micro_batch_size, model_config.seq_len
        self.x = torch.randint(model_config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    def run(self, steps):
        """Tokens per second over `steps` steps."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.model(self.x, self.x)[1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        return steps * self.x.numel() / (time.perf_counter() - start)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(name, values):
    return {f"{name}_{statistic}": f(values) for statistic, f in STATISTICS.items()}


def bench_step(config, model_config, residuals, rounds, steps):
    """-> one dict a pathway: tokens/s and ratio to the first pathway; memory."""
    runs, peaks = {}, {}
    for name in residuals:
        device = choose_device(config.device)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        runs[name] = Step(config, dataclasses.replace(model_config, residual=name, route_heads=None, sites_per_block=None))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        runs[name].run(2)                                                  # warm-up, compilation
        peaks[name] = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    speeds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            speeds[name].append(run.run(steps))
    rows = []
    for name, run in runs.items():
        ratios = [a / b for a, b in zip(speeds[name], speeds[residuals[0]])]
        rows.append({"residual": name, "kernels": run.model.kernels, **summary("tokens_per_s", speeds[name]),
                     **summary("ratio", ratios), "saved_mib": saved_bytes(run.model, run.x) / 2**20,
                     "peak_mib": peaks[name] and peaks[name] / 2**20, "rounds": rounds, "steps": steps})
    return rows


@torch.no_grad()
def bench_sample(config, model_config, residuals, rounds, tokens):
    """-> one dict a pathway: tokens/s of one sample of `tokens` after a prompt of one, and how many times that is without cache."""
    device = choose_device(config.device)
    prompt, models = torch.zeros(1, 1, dtype=torch.long, device=device), {}
    for name in residuals:
        changed = dataclasses.replace(model_config, residual=name, route_heads=None, sites_per_block=None)
        models[name] = GPT(changed, config.init_seed).to(device).eval()
    speeds = {(name, cached): [] for name in models for cached in (True, False)}
    for number in range(rounds + 1):
        for (name, cached), found in speeds.items():
            synchronize(torch.device(device))
            start = time.perf_counter()
            models[name].generate(prompt, tokens, use_cache=cached)
            synchronize(torch.device(device))
            if number:                                                     # the first round is warm-up
                found.append(tokens / (time.perf_counter() - start))
    rows = []
    for name in residuals:
        cached, uncached = speeds[name, True], speeds[name, False]
        rows.append({"residual": name, **summary("tokens_per_s", cached),
                     **summary("ratio", [a / b for a, b in zip(cached, speeds[residuals[0], True])]),
                     **summary("over_no_cache", [a / b for a, b in zip(cached, uncached)]), "rounds": rounds, "tokens": tokens})
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# the reads alone


class Stub(torch.autograd.Function):
    """In place of a sublayer: returns what it is given, and hands back the cotangents it is given. Moves nothing."""

    @staticmethod
    def forward(ctx, n, *tensors):                                         # n mixes, n results, n cotangents
        ctx.n, ctx.cotangents = n, tensors[2 * n:]
        return tuple(y.view_as(y) for y in tensors[n:2 * n])

    @staticmethod
    def backward(ctx, *_):
        return None, *ctx.cotangents, *[None] * (2 * ctx.n)


class Reads:
    """All depth reads of a model of `model_config` on `tokens` random tokens, forward and backward."""

    def __init__(self, model_config, tokens, device, dtype):
        pathway = model_config.pathway_class
        if not (issubclass(pathway, AttnRes) and pathway.reads_out):
            raise ConfigError(f"residual={model_config.residual!r} has no depth attention in place of the residual: try "
                              "--residual=mhar")
        self.streams, R, C = len(pathway.key_stream), 2 * model_config.n_layer + 1, model_config.d_model
        self.arguments = (model_config.route_heads, model_config.norm_eps, pathway.key_stream, pathway.value_stream,
                          model_config.sites_per_block)
        self.query = (torch.randn(R, self.streams, C, device=device) / C ** 0.5).requires_grad_()
        self.gain = torch.ones(R, C, device=device).requires_grad_()
        self.x = torch.randn(self.streams, 1, tokens, C, device=device, dtype=dtype).requires_grad_()
        self.y = torch.randn(self.streams, 1, tokens, C, device=device, dtype=dtype)

    def history(self, kind, rung):
        return kind(rung, self.query, self.gain, *self.arguments)

    def run(self, history, backward=True):
        history.append(tuple(self.x.unbind()))
        step, open_block = self.arguments[-1], None
        for site in range(len(self.gain)):
            mix = history.read(site, open_block)
            open_block = Stub.apply(self.streams, *mix, *self.y, *self.y)
            if (site + 1) % step == 0 and site + 1 < len(self.gain):
                history.append(open_block)
                open_block = None
        if backward:
            torch.autograd.backward(mix, tuple(self.y))


def per_source(op):
    """A library's read of one head as a rung's; no head is cut, so it does the work of H = 1."""
    return lambda values, query, gain, heads, eps, keys=None: op(values, query, gain, eps)


def compiled_read(**options):
    """The specification under torch.compile. It gets its sources stacked: with a list, every number of them is one more
    compilation, and after eight torch gives up."""
    compiled = torch.compile(depth_read_reference, dynamic=True, **options)
    return lambda values, query, gain, heads, eps, keys=None: compiled(
        torch.stack(values), query, gain, heads, eps, None if keys is None else torch.stack(keys))


def contenders(device, dtype, own_keys):
    """{name: (kind of history, rung)} of what runs here."""
    found = {}
    if choose("auto", device.type, dtype) == "triton":
        found["triton"] = TritonHistory, RUNGS["triton"]
    for name in ("lean", "reference"):
        found[name] = RUNGS[name].history, RUNGS[name]
    if device.type == "cuda":
        rung = RUNGS["reference"]
        found["reference, compiled"] = rung.history, rung._replace(read=compiled_read())
        if own_keys:
            try:
                from fla.ops.attnres import fused_attnres
                found["FLA, one head"] = rung.history, rung._replace(read=per_source(
                    lambda values, query, gain, eps: fused_attnres(query.to(values[0].dtype), values, gain.to(values[0].dtype),
                                                                   rms_eps=eps)))
            except ImportError:
                pass
            try:
                from attnres import attnres
                found["fast-attnres, one head"] = rung.history, rung._replace(read=per_source(
                    lambda values, query, gain, eps: attnres(values, (query * gain).to(values[0].dtype), eps=eps)))
            except ImportError:
                pass
    return found


def copy_bandwidth(device):
    """Bytes read and written a second by a copy of 1 GiB (64 MiB on a CPU), the best of 5."""
    a = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    b, best = torch.empty_like(a), 0
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        b.copy_(a)
        synchronize(device)
        best = max(best, 2 * a.numel() / (time.perf_counter() - start))
    return best


def bench_kernels(config, model_config, rounds, steps):
    """-> one dict a contender: microseconds a token and speed against the first; for triton also bytes and bandwidth."""
    device = torch.device(choose_device(config.device))
    dtype = choose_dtype(config.dtype, device.type, device.type == "cuda" and torch.cuda.is_bf16_supported(False))
    tokens = config.micro_batch_size * model_config.seq_len
    reads, bandwidth = Reads(model_config, tokens, device, dtype), copy_bandwidth(device)
    runs = contenders(device, dtype, reads.streams == 1)
    seconds, rows = {name: [] for name in runs}, []
    for turn in range(rounds + 1):                                         # the first is warm-up
        for name, (kind, rung) in runs.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                reads.run(reads.history(kind, rung))
            synchronize(device)
            if turn:
                seconds[name].append((time.perf_counter() - start) / steps)
    first = seconds[next(iter(runs))]
    for name, times in seconds.items():
        row = {"kernels": name, **summary("us_per_token", [t / tokens * 1e6 for t in times]),
               **summary("ratio", [a / b for a, b in zip(first, times)]), "tokens": tokens, "rounds": rounds, "steps": steps}
        if name == "triton":
            moved = sum(traffic(reads.history(*runs[name]), tokens, dtype.itemsize).values())
            row |= {"mb_per_token": moved / 1e6, "bandwidth": moved * tokens / statistics.median(times) / bandwidth}
        rows.append(row)
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# traffic


def traffic(history, tokens, size):
    """
    {what: bytes a token} that a TritonHistory moves forward and backward, in kernels and in torch's copies, with sources of
    `size` bytes an element. What all programs share (queries) is not counted; the cache holds it.
    """
    h, found = history, Counter()
    row, scalars = h.S * h.C, h.S * h.H * 4
    for site in range(1, h.R):
        (start, stop), is_open, closed = h.span(site), site % h.step > 0, site // h.step + 1
        merge, count = site > start, stop - site
        seen = closed + is_open - (start // h.step + 1 if merge else 0)
        partial = 1 if merge else count - 1
        found["bank"] += seen * row * size
        found["out"] += row * size
        found["partial"] += partial * row * 4
        found["lse"] += (2 if merge else count) * scalars
        rows = 1 if merge else closed + is_open                            # backward
        waiting = (0 if merge else closed - (not is_open)) * row * 4       # rows of dbank that stay there
        found["bank"] += rows * row * size
        found["dbank"] += waiting + (stop < h.R) * (waiting + (not is_open) * row * 4)
        found["dnew"] += row * size
        found["cotangent"] += row * size
        found["dout"] += (1 + count) * row * size
        found["out"] += row * size
        found["lse"] += count * scalars
        found["delta"] += (1 + count) * scalars
        found["dqg"] += 2 * count * row * 4 / tokens_of_program(tokens)
        found["copies"] += 2 * row * size                                  # of a source
    found["copies"] += row * (4 * size + 12)                               # at site 0: the source, and its gradient added up
    return found


def best_known(n_layer):
    """
    Bytes a channel and token of the best scheme known before: sources of 2 bytes, reads in groups of G that share a pass over
    the history; in backward every pass over a source reads and writes 8 bytes of its gradient. The best G is taken.
    """
    def total(G):
        moved, seen = 8 * (2 * n_layer + 1), 2
        for start in range(0, 2 * n_layer, G):
            m = min(G, 2 * n_layer - start)
            moved += 12 * seen + 2 + 2 * (m - 1) + 4 * m + sum(12 * k + 8 for k in range(1, m))
            seen += m
        return moved
    return min(map(total, range(1, 2 * n_layer + 1)))


def papers_kernels(n_layer, heads, width):
    """
    Bytes a channel and token of the MHAR paper's fused kernels (its appendix E), as described there: forward copies each
    source into a buffer, reads all of them for each read and writes, reads and writes again their weights; backward reads
    them twice, adds each gradient up in fp32 in place, and writes and sums partial gradients of query and gain.
    """
    reads = 2 * n_layer + 1
    pairs = reads * (reads + 1) // 2
    forward = 2 * pairs + 6 * reads + 12 * heads * pairs / width
    return forward + 12 * pairs + 20 * reads + 8 * heads * pairs / width


@contextmanager
def counted_accesses(found, buffers):
    """Adds the bytes of every load and store of interpreted kernels to found[name]; buffers() gives (name, tensor) pairs."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def count(pointers, mask):
        live = pointers.data[mask.data.astype(bool)]
        if live.size:
            width = pointers.get_element_ty().primitive_bitwidth // 8
            for name, tensor in buffers():
                storage = tensor.untyped_storage()
                if storage.data_ptr() <= int(live[0]) < storage.data_ptr() + storage.nbytes():
                    found[name] += live.size * width
                    return
            raise AssertionError(f"an access at {int(live[0])}, which is in no buffer")

    def counting_load(self, pointers, mask, *args):
        count(pointers, mask)
        return load(self, pointers, mask, *args)

    def counting_store(self, pointers, value, mask, *args):
        count(pointers, mask)
        return store(self, pointers, value, mask, *args)

    Builder.create_masked_load, Builder.create_masked_store = counting_load, counting_store
    try:
        yield
    finally:
        Builder.create_masked_load, Builder.create_masked_store = load, store


class Counted(TritonHistory):
    """Knows the buffers of the launch that is running."""

    def launch(self, kernel, tensors, *rest, **constants):
        self.buffers = list(zip(kernel.arg_names, tensors))
        super().launch(kernel, tensors, *rest, **constants)


def count_bytes(model_config, tokens, dtype):
    """{buffer: bytes} that the kernels move for all reads of `tokens` tokens, forward and backward, counted."""
    reads, found = Reads(model_config, tokens, "cpu", dtype), Counter()
    history = reads.history(Counted, RUNGS["triton"])
    with counted_accesses(found, lambda: history.buffers):
        reads.run(history)
    return found


def bench_bytes(config, model_config, tokens):
    """-> one row a buffer: bytes a token. Partial sums and queries, moved once a program, as in a micro-batch of CONFIG."""
    batch = config.micro_batch_size * model_config.seq_len
    found = count_bytes(model_config, tokens, torch.bfloat16)
    once = -(-tokens // tokens_of_program(tokens)) * tokens_of_program(batch)
    moved = {name: n / (once if name in ("qg", "dqg") else tokens) for name, n in found.items()}
    queries = moved.pop("qg")
    moved["copies"] = traffic(Reads(model_config, 1, "meta", torch.bfloat16).history(TritonHistory, RUNGS["triton"]), batch, 2)["copies"]
    total = sum(moved.values())
    rows = [{"buffer": name, "mb_per_token": n / 1e6} for name, n in sorted(moved.items(), key=lambda item: -item[1])]
    rows += [{"buffer": "total", "mb_per_token": total / 1e6},
             {"buffer": "queries, which the cache holds", "mb_per_token": queries / 1e6}]
    if model_config.sites_per_block == 1:
        C = model_config.d_model
        for name, model in (("best known scheme, model", best_known(model_config.n_layer)), ("the MHAR paper's kernels, model",
                            papers_kernels(model_config.n_layer, model_config.route_heads, C))):
            rows.append({"buffer": name, "mb_per_token": model * C / 1e6, "total_over_it": total / (model * C)})
    return rows


# ----------------------------------------------------------------------------------------------------------------------


def table(rows):
    """Rows of a command as lines of text: numbers with 4 digits, a median with its lowest and highest."""
    def cell(value):
        return "" if value is None else value if isinstance(value, str) else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"

    columns = {}
    for row in rows:
        for key in row:
            columns[key.removesuffix("_median")] = None
    columns = [key for key in columns if not key.endswith(("_low", "_high"))]
    lines = [columns]
    for row in rows:
        lines.append([f"{cell(row[key + '_median'])} [{cell(row[key + '_low'])}, {cell(row[key + '_high'])}]"
                      if key + "_median" in row else cell(row.get(key)) for key in columns])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)                   # --residual is a key of the config
    parser.add_argument("command", choices=("step", "sample", "kernels", "bytes"))
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--residuals", default="add,attnres,mhar,dar", help="of step and sample (default: add,attnres,mhar,dar)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="per round")
    parser.add_argument("--tokens", type=int, help="of bytes (default: 1, as interpreting is slow) and of sample (default: 256)")
    parser.add_argument("--json", metavar="FILE")
    args, overrides = parser.parse_known_args(argv)
    args.tokens = (1 if args.command == "bytes" else 256) if args.tokens is None else args.tokens
    for name in ("rounds", "steps", "tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(args, name)}")
    config, model_config = load_config([args.config, *overrides])
    if args.command == "step":
        rows = bench_step(config, model_config, args.residuals.split(","), args.rounds, args.steps)
    elif args.command == "sample":
        rows = bench_sample(config, model_config, args.residuals.split(","), args.rounds, args.tokens)
    elif args.command == "kernels":
        rows = bench_kernels(config, model_config, args.rounds, args.steps)
    else:
        rows = bench_bytes(config, model_config, args.tokens)
    what = f"{args.command} {' '.join([args.config, *overrides])}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    print(f"{what}: {device}, torch {torch.__version__}; median [lowest, highest]; kernels launched: {launched.total():,}")
    print(table(rows))
    if args.json:
        path = Path(args.json)
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(old | {what: {"device": device, "torch": torch.__version__, "rows": rows}}, indent=1),
                        encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, OSError) as e:
        sys.exit(f"bench.py: {e}")
