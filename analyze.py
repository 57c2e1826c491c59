"""
Figures of runs and checkpoints, each with the numbers behind it as JSON beside it.

    python analyze.py curves RUN...            training and validation loss of runs (out_dir folders) -> RUN/curves.png
    python analyze.py routes CKPT              depth weights of each site and head, mean over validation tokens -> routes.png

--out FILE.png chooses another place.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from errors import ConfigError, DataError
from eval import batch, open_checkpoint, val_windows
from prepare_data import TokenBin


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need the extra 'plot': pip install -e .[plot]") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.style.use("tableau-colorblind10")
    return plt


def save(figure, numbers, out):
    out = Path(out)
    figure.savefig(out, dpi=150)
    out.with_suffix(".json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    print(f"{out} and {out.with_suffix('.json').name}")


def read_log(run):
    path = Path(run) / "log.jsonl"
    if not path.is_file():
        raise ConfigError(f"no run at {run}: it has no log.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def smoothed(values, decay=0.9):
    """Exponential moving average that starts unbiased."""
    weights = decay ** np.arange(len(values))[::-1]
    return [float(np.average(values[:i + 1], weights=weights[-i - 1:])) for i in range(len(values))]


def curves(runs, out):
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    numbers = {}
    for i, run in enumerate(runs):
        log = read_log(run)
        train = [(r["tokens"], r["loss"]) for r in log if "loss" in r]
        val = [(r["tokens"], r["val_loss"]) for r in log if "val_loss" in r and "tokens" in r]
        if not train:
            raise ConfigError(f"{run}/log.jsonl has no training step yet")
        numbers[str(run)] = {"train": train, "val": val}
        tokens, loss = zip(*train)
        axes.plot(tokens, loss, color=f"C{i}", alpha=0.25, linewidth=0.8)
        axes.plot(tokens, smoothed(loss), color=f"C{i}", linewidth=1.5, label=f"{run}: training (smoothed)")
        if val:
            axes.plot(*zip(*val), "o--", color=f"C{i}", markersize=4, label=f"{run}: validation, last {val[-1][1]:.3f}")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title="Loss")
    axes.legend()
    axes.grid(alpha=0.3)
    save(figure, numbers, out or Path(runs[0]) / "curves.png")


def routes(checkpoint, out, tokens):
    plt = pyplot()
    model, _, state = open_checkpoint(checkpoint, "model", "cpu")
    data = TokenBin(state["config"]["data_dir"], "val")
    T = model.config.seq_len
    windows = val_windows(data, T, tokens)
    mean = None                                                            # per read: (streams, N, H)
    for window in windows:
        found = [w.mean((2, 3)).double() for w in model.depth_weights(batch(data, [window], T, "cpu")[0])]
        if not found:
            raise ConfigError(f"residual={model.config.residual!r} does not attend over depth: there are no weights to show")
        mean = found if mean is None else [a + b for a, b in zip(mean, found)]
    mean = [w / len(windows) for w in mean]

    streams, _, heads = mean[0].shape
    maps = np.full((streams, heads, len(mean), mean[-1].shape[1]), np.nan)
    for site, w in enumerate(mean):
        maps[:, :, site, :w.shape[1]] = w.transpose(1, 2)
    panels = [(f"stream {s}, " * (streams > 1) + ("all heads" if h is None else f"head {h}"),
               maps[s].mean(0) if h is None else maps[s, h])
              for s in range(streams) for h in ([None, *range(heads)] if heads > 1 else [None])]
    columns = min(len(panels), 5)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.6 * columns + 1.4, 2.6 * rows + 1), squeeze=False, sharey=True,
                               layout="constrained")
    for ax, panel in zip(axes.flat, panels):
        # square roots of weights decide the colour: of many sources each has little
        image = ax.imshow(panel[1], norm=plt.matplotlib.colors.PowerNorm(0.5, 0, 1), cmap="viridis", aspect="auto")
        ax.set(title=panel[0], xlabel="source (0 = embedding)")
    for ax in list(axes.flat)[len(panels):]:
        ax.axis("off")
    labels = [f"{site} {'A' if site % 2 == 0 else 'F'}" for site in range(model.pathway.n_site)] + ["readout"]
    axes[0, 0].set_yticks(range(len(mean)), labels[:len(mean)], fontsize=6)
    axes[0, 0].set_ylabel("site (A attention, F FFN)")
    figure.colorbar(image, ax=axes, label="depth weight, mean over tokens")
    figure.suptitle(f"{checkpoint}, step {state['step']}: {model.config.residual}, {len(windows) * T:,} tokens of {data.path}")
    numbers = {"checkpoint": str(checkpoint), "step": state["step"], "tokens": len(windows) * T,
               "sources": [model.pathway.sources(site) for site in range(len(mean))],
               "weights": [w.tolist() for w in mean], "axes": "site, stream, source, head"}
    run = Path(checkpoint)
    save(figure, numbers, out or (run if run.is_dir() else run.parent) / "routes.png")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="curves|routes", dest="command")
    sub = commands.add_parser("curves", help="loss of runs")
    sub.add_argument("run", nargs="+", metavar="RUN")
    sub.add_argument("--out", metavar="PNG")
    sub = commands.add_parser("routes", help="depth weights of a checkpoint")
    sub.add_argument("checkpoint", metavar="CKPT")
    sub.add_argument("--out", metavar="PNG")
    sub.add_argument("--tokens", type=int, default=8192, help="of the val split, evenly spread (default: 8192)")
    args = parser.parse_args(argv)
    if args.command == "curves":
        curves(args.run, args.out)
    else:
        routes(args.checkpoint, args.out, args.tokens)


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError, OSError) as e:
        sys.exit(f"analyze.py: {e}")
