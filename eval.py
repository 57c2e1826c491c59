"""
Evaluate and sample checkpoints of train.py. CKPT is a .pt file or the out_dir of a run (its latest checkpoint).

    python eval.py loss CKPT...                            loss on the val split of its data (--data_dir: of other data)
    python eval.py text CKPT FILE...                       perplexity and bits per byte of text files
    python eval.py sample CKPT --prompt "def main("        continue a prompt

Everything needed comes from the checkpoint, its tokenizer included; nothing in it is executed. Losses are in nats a token,
perplexity is exp(loss), bits per byte is total loss / ln 2 / bytes of UTF-8 text. Each number is printed with the tokens,
context and stride that it rests on; --json FILE writes the same as JSON.
"""

import argparse
import codecs
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

import route_kernels
from checkpoints import load_checkpoint, tokenizer_of
from errors import ConfigError, DataError
from model import GPT, ModelConfig
from prepare_data import TokenBin


def choose_device(name):
    """'auto' -> cuda, mps or cpu; any other name is checked to be there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.partition(":")[0]                                          # of cuda:1, say
    if kind not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"unknown device={name!r}; known: auto, cpu, cuda, mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch sees no GPU: use --device=cpu, or install a CUDA build of torch")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name}, but torch has no MPS here: use --device=cpu")
    return name


def choose_kernels(name, device, dtype, config):
    """
    The rung of route_kernels for a device ("cuda:0", say), dtype of activations and ModelConfig; "auto" is the fastest that
    runs there and knows the pathway.
    """
    try:
        chosen = route_kernels.choose(name, str(device).partition(":")[0], dtype)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    return "lean" if name == "auto" and chosen not in config.pathway_class.rungs(config) else chosen


def val_windows(data, seq_len, eval_tokens):
    """Numbers of the windows that hold eval_tokens tokens (None = all windows), evenly spread: the same in every run."""
    n = data.n_windows(seq_len)
    count = n if eval_tokens is None else eval_tokens // seq_len
    if not 1 <= count <= n:
        raise ConfigError(f"eval_tokens={eval_tokens}, but {data.path} has {n} windows of seq_len={seq_len}: choose "
                          f"{seq_len} to {n * seq_len}, or None for all")
    return np.arange(count) * n // count


def batch(data, windows, seq_len, device):
    """Inputs and targets of windows of a TokenBin, each (len(windows), seq_len)."""
    tokens = torch.from_numpy(data.windows(windows, seq_len)).to(device, non_blocking=True)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@torch.no_grad()
def window_losses(model, data, windows, batch_size, device, rank=0, world=1):
    """
    Mean loss in nats of each window of a TokenBin, (len(windows),) float64; process `rank` of `world` computes every
    world-th batch and leaves zeros elsewhere, so that the sum over processes is the same to the bit for any number of them.
    """
    losses = torch.zeros(len(windows), dtype=torch.float64)
    was_training = model.training
    model.eval()
    starts = range(0, len(windows), batch_size)
    for i in range(rank, -(-len(starts) // world) * world, world):
        start = starts[min(i, len(starts) - 1)]                                # FSDP: all processes run the model equally often
        part = windows[start:start + batch_size]
        x, y = batch(data, np.resize(part, batch_size), model.config.seq_len, device)        # one shape, for torch.compile
        loss = model(x, y, reduction="none")[1].mean(1).cpu()[:len(part)].double()
        if i < len(starts):
            losses[start:start + len(part)] = loss
    model.train(was_training)
    return losses


@torch.no_grad()
def text_losses(model, ids, eot, stride, batch_size, device):
    """
    Loss of each id of a text, (n,) float64. The text follows an end-of-text id, so its first id is scored too. Windows
    of seq_len start every `stride` ids; what a window shares with the one before serves as context only. stride = seq_len
    gives disjoint windows, a smaller one longer contexts.
    """
    T, n = model.config.seq_len, len(ids)
    tokens = torch.from_numpy(np.append([eot], ids).astype(np.int64))
    starts = list(range(0, max(1, n - T + stride), stride))                # the last one reaches the end
    losses = torch.zeros(n, dtype=torch.float64)
    for at in range(0, len(starts), batch_size):
        group = starts[at:at + batch_size]
        x, y = torch.full((len(group), T), eot), torch.full((len(group), T), -100)
        for row, start in enumerate(group):
            stop, fresh = min(start + T, n), (0 if start == 0 else T - stride)
            x[row, :stop - start] = tokens[start:stop]
            y[row, fresh:stop - start] = tokens[start + 1 + fresh:stop + 1]
        loss = model(x.to(device), y.to(device), reduction="none")[1].cpu().double()
        for row, start in enumerate(group):
            scored = y[row] >= 0
            losses[start + torch.nonzero(scored).squeeze(1)] = loss[row, scored]
    return losses


def numbers(total, tokens, n_bytes):
    """The figures of `total` nats over `tokens` scored tokens that spell n_bytes bytes."""
    loss = total / tokens
    if not loss < 700:                                                     # NaN too; exp(709) is the largest of a float
        raise ConfigError(f"the loss is {loss:.4g} nats a token: the checkpoint is broken")
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": total / math.log(2) / n_bytes if n_bytes else None,
            "tokens": tokens, "bytes": n_bytes}


def open_checkpoint(path, weights, device):
    """-> (model, tokenizer, state), state without the weights."""
    state = load_checkpoint(path)
    missing = {"step", "tokenizer"} - state.keys()
    if missing:
        raise ConfigError(f"{path} is no checkpoint of train.py: it lacks {' and '.join(sorted(missing))}")
    kernels = choose_kernels("auto", device, torch.float32, ModelConfig.of_checkpoint(state))
    model = GPT.from_checkpoint(state, weights, kernels).to(device)
    tokenizer = tokenizer_of(state)
    model.eot = tokenizer.eot if state["config"].get("doc_mask") else None
    return model, tokenizer, {key: state[key] for key in ("config", "step")}


def check_ids(top, model, where):
    """Refuse a largest id for which the embedding has no row."""
    if top >= model.config.vocab_size:
        raise DataError(f"{where} holds token id {top}, but the model's vocab_size is {model.config.vocab_size}")


def cmd_loss(args):
    rows = []
    for path in args.checkpoint:
        model, tokenizer, state = open_checkpoint(path, args.weights, args.device)
        data_dir = args.data_dir or state["config"].get("data_dir")
        if data_dir is None:
            raise ConfigError(f"no data_dir in {path}, which was not trained here: say which with --data_dir")
        data = TokenBin(data_dir, "val")
        if data.meta["tokenizer"]["sha256"] != tokenizer.sha256:
            raise DataError(f"{data.path} was made with tokenizer {data.meta['tokenizer']['name']!r}, {path} was trained with "
                            f"another, {tokenizer.name!r}")
        check_ids(data.max_id, model, data.path)
        T = model.config.seq_len
        windows = val_windows(data, T, args.tokens)
        losses = window_losses(model, data, windows, args.batch_size, args.device)
        ids, counts = np.unique(data.windows(windows, T)[:, 1:], return_counts=True)
        n_bytes = int(sum(n * len(tokenizer.token_bytes(int(i))) for i, n in zip(ids, counts)))
        rows.append({"checkpoint": str(path), "step": state["step"], "weights": args.weights, "data": str(data.path),
                     **numbers(losses.sum().item() * T, len(windows) * T, n_bytes), "context": T, "stride": T})
    report(rows, args.json)


def cmd_text(args):
    model, tokenizer, state = open_checkpoint(args.checkpoint, args.weights, args.device)
    T = model.config.seq_len
    stride = T if args.stride is None else args.stride
    if not 1 <= stride <= T:
        raise ConfigError(f"--stride must be in 1 .. {T} (seq_len), not {stride}")
    rows = []
    for path in args.file:
        try:
            text = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8")
        except UnicodeDecodeError as e:
            raise DataError(f"{path}: not UTF-8 (byte {e.start})") from None
        ids = tokenizer.encode(text)
        if len(ids) == 0:
            raise DataError(f"{path} is empty")
        check_ids(max(ids.max(), tokenizer.eot), model, f"{path}, after an end of text,")
        losses = text_losses(model, ids, tokenizer.eot, stride, args.batch_size, args.device)
        rows.append({"checkpoint": str(args.checkpoint), "step": state["step"], "weights": args.weights, "text": str(path),
                     **numbers(losses.sum().item(), len(ids), len(text.encode())), "context": T, "stride": stride})
    report(rows, args.json)


def cmd_sample(args):
    if args.max_new_tokens < 1 or args.num_samples < 1:
        raise ConfigError("--max_new_tokens and --num_samples must be at least 1")
    model, tokenizer, state = open_checkpoint(args.checkpoint, args.weights, args.device)
    prompt = args.prompt.encode(errors="surrogateescape").decode(errors="replace")     # of a terminal that is not UTF-8
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot]
    check_ids(max(ids), model, "the prompt")
    if len(ids) > model.config.seq_len:
        print(f"the prompt has {len(ids)} tokens, the context {model.config.seq_len}: the newest are read", file=sys.stderr)
    rows, clock = [], time.perf_counter()
    for n in range(args.num_samples):
        generator = torch.Generator(args.device).manual_seed(args.seed + n)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")         # holds back characters that are not whole yet
        text, count = "", 0
        print(prompt, end="")
        for token in model.stream(torch.tensor([ids], device=args.device), args.max_new_tokens, args.temperature, args.top_k,
                                  args.top_p, tokenizer.n_vocab, generator):
            count += 1
            ended = token.item() == tokenizer.eot
            piece = decoder.decode(tokenizer.token_bytes(token.item()))
            print(piece, end="", flush=True)
            text += piece
            if ended:
                break
        tail = decoder.decode(b"", final=True)
        print(tail + ("" if n + 1 == args.num_samples else "\n" + "-" * 80))
        rows.append({"prompt": prompt, "text": text + tail, "tokens": count, "seed": args.seed + n, "ended": ended})
    seconds = time.perf_counter() - clock
    print(f"[{sum(r['tokens'] for r in rows)} tokens, {sum(r['tokens'] for r in rows) / seconds:.0f} tokens/s]", file=sys.stderr)
    if args.json:
        write_json(rows, args.json)


def report(rows, json_path):
    """Print rows as a table; as JSON too if asked."""
    shown = [{key: f"{v:.4f}" if isinstance(v, float) else str(v) for key, v in row.items()} for row in rows]
    widths = {key: max(len(key), *(len(row[key]) for row in shown)) for key in shown[0]}
    for row in [dict(zip(widths, widths)), *shown]:
        print("  ".join(row[key].ljust(width) for key, width in widths.items()).rstrip())
    if json_path:
        write_json(rows, json_path)


def write_json(rows, path):
    Path(path).write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="loss|text|sample")

    def command(name, function, help, n_checkpoints=None):
        sub = commands.add_parser(name, help=help)
        sub.set_defaults(function=function)
        sub.add_argument("checkpoint", nargs=n_checkpoints, metavar="CKPT")
        sub.add_argument("--weights", default="model", choices=("model", "ema"))
        sub.add_argument("--device", default="auto")
        sub.add_argument("--json", metavar="FILE", help="write the results here")
        return sub

    sub = command("loss", cmd_loss, "loss on a val split", "+")
    sub.add_argument("--data_dir", help="default: the one it was trained on")
    sub.add_argument("--tokens", type=int, help="how many, evenly spread; default: all")
    sub.add_argument("--batch_size", type=int, default=8)
    sub = command("text", cmd_text, "perplexity and bits per byte of text files")
    sub.add_argument("file", nargs="+", metavar="FILE")
    sub.add_argument("--stride", type=int, help="default: seq_len, which is disjoint windows; less = sliding windows")
    sub.add_argument("--batch_size", type=int, default=8)
    sub = command("sample", cmd_sample, "continue a prompt")
    sub.add_argument("--prompt", default="", help="default: start of a document")
    sub.add_argument("--max_new_tokens", type=int, default=256)
    sub.add_argument("--num_samples", type=int, default=1)
    sub.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest token")
    sub.add_argument("--top_k", type=int, default=0, help="0 = off")
    sub.add_argument("--top_p", type=float)
    sub.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.device = choose_device(args.device)
    if vars(args).get("batch_size", 1) < 1:
        raise ConfigError(f"--batch_size must be at least 1, not {args.batch_size}")
    args.function(args)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")                               # samples hold any character, whatever the locale
    try:
        main()
    except (ConfigError, DataError, OSError) as e:
        sys.exit(f"eval.py: {e}")
