"""
Evaluate and sample checkpoints of train.py and convert.py. CKPT is a .pt file or the out_dir of a run (its latest checkpoint).

    python eval.py loss CKPT...                            loss on the val split of its data (--data_dir: of other data)
    torchrun --nproc_per_node=8 eval.py loss CKPT...       the same numbers, sooner
    python eval.py text CKPT FILE...                       perplexity and bits per byte of text files
    python eval.py tasks CKPT... --tasks hellaswag,arc_easy          EleutherAI's harness (pip install -e .[eval])
    python eval.py sample CKPT --prompt "def main("        continue a prompt, or the lines of a file, or what is typed

Everything needed comes from the checkpoint, its tokenizer included; nothing in it is executed. Losses are in nats a token,
perplexity is exp(loss), bits per byte is total loss / ln 2 / bytes of UTF-8 text. Each number is printed with the tokens,
context and stride that it rests on; --json FILE writes the same, and more, as JSON. Of several checkpoints all but the first
are compared with the first, window by window or item by item.
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
from tqdm import tqdm

import route_kernels
from checkpoints import load_checkpoint, tokenizer_of
from errors import ConfigError, DataError
from model import GPT, ModelConfig
from prepare_data import TokenBin
from processes import Processes, choose_device


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


# ----------------------------------------------------------------------------------------------------------------------
# losses of windows


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
def window_losses(model, data, windows, batch_size, device, rank=0, world=1, each=None):
    """
    Mean loss in nats of each window of a TokenBin, (len(windows),) float64; process `rank` of `world` computes every
    world-th batch and leaves zeros elsewhere, so that the sum over processes is the same to the bit for any number of them.
    each(places, x, losses) is told the places in `windows` of a batch, its inputs and the loss of each token (n, T) float64.
    """
    losses = torch.zeros(len(windows), dtype=torch.float64)
    was_training = model.training
    model.eval()
    starts = range(0, len(windows), batch_size)
    for i in range(rank, -(-len(starts) // world) * world, world):
        start = starts[min(i, len(starts) - 1)]                                # FSDP: all processes run the model equally often
        part = windows[start:start + batch_size]
        x, y = batch(data, np.resize(part, batch_size), model.config.seq_len, device)        # one shape, for torch.compile
        loss = model(x, y, reduction="none")[1]
        if i < len(starts):
            losses[start:start + len(part)] = loss.mean(1).cpu()[:len(part)].double()
            if each is not None:
                each(slice(start, start + len(part)), x[:len(part)].cpu(), loss[:len(part)].cpu().double())
    model.train(was_training)
    return losses


@torch.no_grad()
def text_losses(model, ids, eot, stride, batch_size, device):
    """
    Loss of each id of a text, (n,) float64, and how many earlier ids of the text its window held, (n,). The text follows an
    end-of-text id, so its first id is scored too. Windows of seq_len start every `stride` ids; what a window shares with the
    one before serves as context only. stride = seq_len gives disjoint windows, a smaller one longer contexts.
    """
    T, n = model.config.seq_len, len(ids)
    tokens = torch.from_numpy(np.append([eot], ids).astype(np.int64))
    starts = list(range(0, max(1, n - T + stride), stride))                # the last one reaches the end
    losses, seen = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
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
            seen[start + torch.nonzero(scored).squeeze(1)] = torch.nonzero(scored).squeeze(1) + (start > 0)
    return losses, seen


def in_sight(x, eot):
    """Of inputs (n, T): how many tokens of the document of each target the window holds before it, (n, T)."""
    at = torch.arange(x.shape[1])
    last = torch.where(x == eot, at, -1).cummax(1).values
    return at - last


class ByPosition:
    """
    Losses by the number of tokens of their document in sight: 0, 1, 2-3, 4-7, ... Kept for each window apart, so that the
    sums of several processes are the same to the bit for any number of them.
    """

    def __init__(self, n_windows, seq_len):
        self.names = ["0"] + [f"{2 ** k}-{2 ** (k + 1) - 1}" if k else "1" for k in range(seq_len.bit_length())]
        self.sums = torch.zeros(2, n_windows, len(self.names), dtype=torch.float64)    # losses, tokens

    def add(self, windows, seen, losses):
        """Losses (n, T) of `windows` (a slice); seen (n, T)."""
        bucket = torch.where(seen > 0, seen.clamp(min=1).double().log2().floor().long() + 1, 0)
        for total, values in zip(self.sums, (losses, torch.ones_like(losses))):
            total[windows].scatter_add_(1, bucket, values)

    def result(self):
        """{bucket: {"loss": mean, "tokens": count}}, those that hold any."""
        totals, counts = self.sums.sum(1).tolist()
        return {name: {"loss": total / n, "tokens": int(n)} for name, total, n in zip(self.names, totals, counts) if n}


# ----------------------------------------------------------------------------------------------------------------------
# numbers


def numbers(total, tokens, n_bytes):
    """The figures of `total` nats over `tokens` scored tokens that spell n_bytes bytes."""
    loss = total / tokens
    if not loss < 700:                                                     # NaN too; exp(709) is the largest of a float
        raise ConfigError(f"the loss is {loss:.4g} nats a token: the checkpoint is broken")
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": total / math.log(2) / n_bytes if n_bytes else None,
            "tokens": tokens, "bytes": n_bytes}


def paired(first, other):
    """The mean of other - first over n windows or items, its standard error and 95 % interval (as if they were independent)."""
    d = np.asarray(other, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    mean, error = d.mean().item(), d.std(ddof=1).item() / math.sqrt(len(d)) if len(d) > 1 else math.nan
    return {"difference": mean, "standard_error": error, "low": mean - 1.96 * error, "high": mean + 1.96 * error, "n": len(d)}


def show_table(rows):
    """Print dicts of one kind as a table; what is nested stays out."""
    shown = [{key: f"{v:.4f}" if isinstance(v, float) else "" if v is None else str(v) for key, v in row.items()
              if not isinstance(v, (dict, list))} for row in rows]
    widths = {key: max(len(key), *(len(row[key]) for row in shown)) for key in shown[0]}
    for row in [dict(zip(widths, widths)), *shown]:
        print("  ".join(row[key].ljust(width) for key, width in widths.items()).rstrip())


def show_positions(columns):
    """Losses of {name: ByPosition.result()} beside each other."""
    print("\nloss by tokens of the document in sight")
    names = dict.fromkeys(name for column in columns.values() for name in column)
    show_table([{"in sight": name, "tokens": next(c[name]["tokens"] for c in columns.values() if name in c)}
                | {label: c[name]["loss"] if name in c else None for label, c in columns.items()} for name in names])


def write_json(found, path):
    if path:
        Path(path).write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------------
# commands


def cmd_loss(args):
    processes = Processes(args.device)
    rows, losses, columns = [], [], {}
    for path in args.checkpoint:
        model, tokenizer, state = open_checkpoint(path, args.weights, processes.device)
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
        positions = ByPosition(len(windows), T)
        found = window_losses(model, data, windows, args.batch_size, processes.device, processes.rank, processes.world,
                              lambda places, x, loss: positions.add(places, in_sight(x, tokenizer.eot), loss))
        losses.append(processes.sum(found).numpy())
        processes.sum(positions.sums)
        ids, counts = np.unique(data.windows(windows, T)[:, 1:], return_counts=True)
        n_bytes = int(sum(n * len(tokenizer.token_bytes(int(i))) for i, n in zip(ids, counts)))
        columns[str(path)] = positions.result()
        rows.append({"checkpoint": str(path), "step": state["step"], "weights": args.weights, "data": str(data.path),
                     **numbers(losses[-1].sum().item() * T, len(windows) * T, n_bytes), "context": T, "stride": T,
                     "by_position": columns[str(path)]})
    if processes.rank == 0:
        show_table(rows)
        for row, of_windows in zip(rows[1:], losses[1:]):
            same = all(row[key] == rows[0][key] for key in ("data", "tokens", "context"))
            row["against_first"] = paired(losses[0], of_windows) if same else None
        if len(rows) > 1:
            print("\ndifference to the first, over the same windows")
            show_table([{"checkpoint": row["checkpoint"]} | (row["against_first"] or dict.fromkeys(paired([0], [0]), "other windows"))
                        for row in rows[1:]])
        show_positions(columns)
        write_json(rows, args.json)
    processes.close()


def cmd_text(args):
    model, tokenizer, state = open_checkpoint(args.checkpoint, args.weights, args.device)
    T = model.config.seq_len
    if args.stride is not None and not 1 <= args.stride <= T:
        raise ConfigError(f"--stride must be in 1 .. {T} (seq_len), not {args.stride}")
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
        for stride in [args.stride] if args.stride is not None else dict.fromkeys((T, max(1, T // 2))):
            losses, seen = text_losses(model, ids, tokenizer.eot, stride, args.batch_size, args.device)
            positions = ByPosition(1, T)
            positions.add(slice(0, 1), seen[None], losses[None])
            rows.append({"checkpoint": str(args.checkpoint), "step": state["step"], "weights": args.weights, "text": str(path),
                         "windows": "disjoint" if stride == T else "sliding",
                         **numbers(losses.sum().item(), len(ids), len(text.encode())), "context": T, "stride": stride,
                         "by_position": positions.result()})
    show_table(rows)
    show_positions({f"{row['text']}, {row['windows']}": row["by_position"] for row in rows})
    write_json(rows, args.json)


def cmd_tasks(args):
    try:
        import harness
    except ImportError as e:                                               # lm-eval, or what it needs
        raise ConfigError(f"the harness needs the package {e.name}: pip install -e .[eval]") from None
    found = harness.run([(str(path), *open_checkpoint(path, args.weights, args.device)[:2]) for path in args.checkpoint],
                        args.tasks.split(","), args.device, args.batch_size, args.limit, args.num_fewshot, args.include_path)
    show_table(found["results"])
    if found["against_first"]:
        print("\ndifference to the first, over the same items")
        show_table(found["against_first"])
    for note in found["notes"]:
        print(note, file=sys.stderr)
    write_json(found, args.json)


def cmd_sample(args):
    for name in ("max_new_tokens", "num_samples"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if (args.prompt is not None) + (args.prompts is not None) + args.interactive > 1:
        raise ConfigError("give one of --prompt, --prompts and --interactive")
    model, tokenizer, _ = open_checkpoint(args.checkpoint, args.weights, args.device)
    if args.interactive:
        print("An empty line ends this; Ctrl-C ends a sample.")
        while prompt := typed():
            try:
                sample(model, tokenizer, [prompt], args)
            except KeyboardInterrupt:
                print()
        return
    rows = sample(model, tokenizer, [args.prompt or ""] if args.prompts is None else read_prompts(args.prompts), args)
    write_json(rows, args.json)


def typed():
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return ""


def read_prompts(path):
    """One a line: of a .jsonl file the strings, or what they have under "prompt"; of any other file the lines themselves."""
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line) if path.endswith(".jsonl") else line
            except ValueError as e:
                raise DataError(f"{path}:{number}: not JSON ({e})") from None
            found.append(row.get("prompt") if isinstance(row, dict) else row)
            if not isinstance(found[-1], str):
                raise DataError(f'{path}:{number}: neither a string nor {{"prompt": a string}}')
    if not found:
        raise DataError(f"{path} holds no prompts")
    return found


def sample(model, tokenizer, prompts, args):
    """Print num_samples samples of each prompt, number n of them drawn with seed + n whatever else is in its batch; -> rows."""
    prompts = [p.encode(errors="surrogateescape").decode(errors="replace") for p in prompts]    # of a terminal that is not UTF-8
    jobs = []
    for prompt in prompts:
        ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eot]
        check_ids(max(ids), model, "the prompt")
        if len(ids) > model.config.seq_len:
            print(f"a prompt has {len(ids)} tokens, the context {model.config.seq_len}: the newest are read", file=sys.stderr)
        jobs += [(prompt, ids, args.seed + n) for n in range(args.num_samples)]
    longest = max(len(ids) for _, ids, _ in jobs) + args.max_new_tokens
    if longest > model.config.seq_len:
        print(f"up to {longest} tokens for a context of {model.config.seq_len}: whenever it is full, its newest half goes on",
              file=sys.stderr)
    rows, clock = [], time.perf_counter()
    alone = len(jobs) == 1
    with tqdm(total=len(jobs), unit="sample", disable=True if alone else None, leave=False) as bar:
        for at in range(0, len(jobs), args.batch_size):
            rows += sample_batch(model, tokenizer, jobs[at:at + args.batch_size], args, alone)
            bar.update(len(jobs[at:at + args.batch_size]))
    seconds, count = time.perf_counter() - clock, sum(row["tokens"] for row in rows)
    if not alone:
        print(("\n" + "-" * 80 + "\n").join(row["prompt"] + row["text"] for row in rows))
    print(f"[{count} tokens, {count / seconds:.0f} tokens/s]", file=sys.stderr)
    return rows


def sample_batch(model, tokenizer, jobs, args, show):
    """Rows of (prompt, ids, seed), read together; `show` prints the one there is as it comes."""
    rows = [{"prompt": prompt, "text": "", "prompt_tokens": len(ids), "tokens": 0, "seed": seed, "ended": False}
            for prompt, ids, seed in jobs]
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in jobs]        # hold back characters that are not whole yet
    generators = [torch.Generator(args.device).manual_seed(seed) for *_, seed in jobs]
    if show:
        print(jobs[0][0], end="", flush=True)
    for token in model.stream([torch.tensor(ids, device=args.device) for _, ids, _ in jobs], args.max_new_tokens,
                              temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, n_vocab=tokenizer.n_vocab,
                              generator=generators):
        for row, decoder, t in zip(rows, decoders, token.tolist()):
            if not row["ended"]:
                row["tokens"] += 1
                row["ended"] = t == tokenizer.eot
                piece = decoder.decode(tokenizer.token_bytes(t), final=row["ended"])
                row["text"] += piece
                if show:
                    print(piece, end="", flush=True)
        if all(row["ended"] for row in rows):
            break
    for row, decoder in zip(rows, decoders):
        tail = decoder.decode(b"", final=True)
        row["text"] += tail
        if show:
            print(tail)
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="loss|text|tasks|sample")

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
    sub.add_argument("--stride", type=int, help="of the windows; default: seq_len (disjoint), and half of it (sliding)")
    sub.add_argument("--batch_size", type=int, default=8)
    sub = command("tasks", cmd_tasks, "tasks of EleutherAI's harness", "+")
    sub.add_argument("--tasks", required=True, metavar="NAME[,NAME...]")
    sub.add_argument("--include_path", metavar="DIR", help="of task files of your own")
    sub.add_argument("--limit", type=int, help="items a task; default: all")
    sub.add_argument("--num_fewshot", type=int, help="default: the task's")
    sub.add_argument("--batch_size", type=int, help="sequences at once; default: what fits")
    sub = command("sample", cmd_sample, "continue prompts")
    sub.add_argument("--prompt", help="default: start of a document")
    sub.add_argument("--prompts", metavar="FILE", help='a prompt a line; of .jsonl a string or {"prompt": ...} a line')
    sub.add_argument("--interactive", action="store_true", help="prompts from the keyboard")
    sub.add_argument("--max_new_tokens", type=int, default=256)
    sub.add_argument("--num_samples", type=int, default=1, help="of each prompt")
    sub.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest token")
    sub.add_argument("--top_k", type=int, default=0, help="0 = off")
    sub.add_argument("--top_p", type=float)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--batch_size", type=int, default=16, help="samples drawn at once")
    args = parser.parse_args(argv)
    args.device = choose_device(args.device)
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch_size must be at least 1, not {args.batch_size}")
    args.function(args)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")                               # samples hold any character, whatever the locale
    try:
        main()
    except (ConfigError, DataError, OSError) as e:
        sys.exit(f"eval.py: {e}")
