"""
Speed and memory, side by side in one run.

    python bench.py step configs/demo.py                          whole training steps: add, attnres, mhar, dar
    python bench.py step configs/mhar_100m.py --residuals=add,mhar --rounds=7 --micro_batch_size=4

Each round runs every pathway once, in turn, so that a slow moment of the machine hits all of them; a ratio is the median
over rounds of (tokens/s of the pathway) / (tokens/s of the first one in the same round), with the lowest and highest.
Any --key=value of a config works. --json FILE writes the table as JSON.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from eval import choose_device, choose_kernels
from model import GPT, ConfigError
from train import choose_dtype, load_config


def saved_bytes(model, x):
    """Bytes of distinct storages, parameters aside, that autograd keeps for the backward of one forward of x (B, T)."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage                                 # held, or its address would be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x, x)
    return sum(storage.nbytes() for storage in kept.values())


class Step:
    """A model and its optimizer, ready to take training steps on random tokens."""

    def __init__(self, config, model_config):
        device = choose_device(config.device)
        self.device = torch.device(device)
        dtype = choose_dtype(config.dtype, device, device == "cuda" and torch.cuda.is_bf16_supported(False))
        self.model = GPT(model_config, config.init_seed, choose_kernels(config.kernels, device, dtype))
        self.model.to(self.device, getattr(torch, config.param_dtype))
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
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.model(self.x, self.x)[1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.synchronize()
        return steps * self.x.numel() / (time.perf_counter() - start)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bench_step(config_args, residuals, rounds, steps):
    """-> one dict a pathway: tokens/s and ratio to the first pathway, median, lowest and highest over rounds; memory."""
    config, model_config = load_config(config_args)
    runs = {name: Step(config, dataclasses.replace(model_config, residual=name, route_heads=None, sites_per_block=None))
            for name in residuals}
    for run in runs.values():
        run.run(2)                                                         # warm-up, compilation
    speeds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            speeds[name].append(run.run(steps))
    rows = []
    for name, run in runs.items():
        ratios = [a / b for a, b in zip(speeds[name], speeds[residuals[0]])]
        rows.append({"residual": name, "kernels": run.model.kernels,
                     **{f"tokens_per_s_{k}": f(speeds[name]) for k, f in STATISTICS.items()},
                     **{f"ratio_{k}": f(ratios) for k, f in STATISTICS.items()},
                     "saved_mib": saved_bytes(run.model, run.x) / 2**20, "rounds": rounds, "steps": steps})
    return rows


STATISTICS = {"median": statistics.median, "low": min, "high": max}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("step",))
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--residuals", default="add,attnres,mhar,dar", help="default: add,attnres,mhar,dar")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="per round")
    parser.add_argument("--json", metavar="FILE")
    args, overrides = parser.parse_known_args(argv)
    rows = bench_step([args.config, *overrides], args.residuals.split(","), args.rounds, args.steps)
    print(f"training step of {args.config}, kernels {rows[0]['kernels']}, {torch.get_num_threads()} threads, {args.rounds} rounds "
          f"of {args.steps} steps: median [lowest, highest]")
    for row in rows:
        print(f"{row['residual']:12s} {row['tokens_per_s_median']:10,.0f} tokens/s "
              f"[{row['tokens_per_s_low']:,.0f}, {row['tokens_per_s_high']:,.0f}]  ratio {row['ratio_median']:.2f} "
              f"[{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]  saved for backward {row['saved_mib']:.0f} MiB")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, OSError) as e:
        sys.exit(f"bench.py: {e}")
