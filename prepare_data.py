"""
Text -> token bins, and the reader of bins.

    python prepare_data.py --demo                                          the Python library's own sources, byte tokenizer
    python prepare_data.py --input FILES_OR_DIRS... --tokenizer byte --out data/NAME
    python prepare_data.py --source web=DIR:0.7 --source code=DIR,DIR:0.3 --tokenizer byte --out data/NAME
    python prepare_data.py inspect data/NAME                               what is in it: counts, lengths, samples
    python prepare_data.py verify data/NAME                                does it still hold what was written

writes data/NAME/train.bin and val.bin (bare token ids, uint16 where every id of the tokenizer fits, else uint32) and
meta.json, which says what they hold. What a document is, documents.py says. Its ids are followed by one end-of-text id.
Special-token text inside a document is text. Empty documents are skipped.

A document goes to train or val by a hash of its text: adding files never moves one, and copies land on one side. The bytes
written depend on nothing else: not on the number of workers, nor on interruptions. Until all is written the folder is
called NAME.partial; the same command, started again, goes on from there.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections import Counter, deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from documents import KNOWN, PIECE, Bad, Piece, documents, find_files
from errors import DataError
from tokenizer import SPLIT_PATTERNS, load_tokenizer, restore_tokenizer

FORMAT = 1                                # of the folder; a reader refuses any other
SAVE_EVERY = 10                           # seconds between notes of how far it is
SPLITS = "train", "val"


# ----------------------------------------------------------------------------------------------------------------------
# sources


@dataclass
class Source:
    """
    name, files  paths, or hf:... addresses
    weight       share of the text, in bytes, that comes from this source; None = all of it
    """
    name: str
    files: list
    weight: float | None = None


def parse_source(text):
    """NAME=PATH[,PATH...]:WEIGHT"""
    name, equals, rest = text.partition("=")
    paths, colon, weight = rest.rpartition(":")
    try:
        weight = float(weight)
    except ValueError:
        weight = 0
    if not (name and equals and paths and colon and 0 < weight < float("inf")):
        raise DataError(f"--source {text}: write NAME=PATH[,PATH...]:WEIGHT, with a weight above 0")
    return Source(name, find_files(paths.split(",")), weight)


class Reader:
    """
    The pieces of a source, from a position on: [number of the file, pieces of it that are done, bytes of text so far, is that
    inside of a document]. `at` is the position after the last piece taken.
    """

    def __init__(self, source, text_key, at, tick):
        self.source, self.text_key, self.tick, self.at = source, text_key, tick, list(at)
        self.pieces = self.walk()

    def walk(self):
        for number in range(self.at[0], len(self.source.files)):
            done = self.at[1] if number == self.at[0] else 0
            self.at[:2] = number, done
            for i, piece in enumerate(documents(self.source.files[number], self.text_key, self.tick)):
                if i >= done:
                    self.at[1] = i + 1
                    yield piece

    def take(self):
        """The next piece, or None at the end."""
        piece = next(self.pieces, None)
        if isinstance(piece, Piece):
            self.at[2:] = self.at[2] + piece.size, not piece.last
        return piece


def mixed(readers):
    """
    Pieces of all readers: one source after the other; or, with weights, each document from the source that is furthest
    behind its share, until one of them is exhausted.
    """
    if readers[0].source.weight is None:
        for reader in readers:
            while (piece := reader.take()) is not None:
                yield piece
        return
    while True:
        reader = min(readers, key=lambda r: (not r.at[3], r.at[2] / r.source.weight))      # first the one inside of a document
        while (piece := reader.take()) is not None:
            yield piece
            if isinstance(piece, Bad) or piece.last:
                break
        else:
            return


def demo_files():
    """The .py files of the running interpreter's standard library that are UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))

    def is_utf8(path):
        try:
            path.read_bytes().decode("utf-8")
            return True
        except UnicodeDecodeError:                                        # test inputs of the library's own
            return False

    return [p for p in found if is_utf8(p)]


def file_hash(path):
    h = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


def fingerprint(path):
    """What identifies an input in meta.json."""
    return {"path": path} if isinstance(path, str) else {"path": str(path), "bytes": path.stat().st_size, "sha256": file_hash(path)}


def split_of(digest, val_permille, seed=0):
    """
    "val" for about val_permille of 1000 documents, by the hash of the text alone. Seeds 0, 1, 2, .. hold out different
    documents, none of them twice until all have been.
    """
    return "val" if (int.from_bytes(digest, "big") + seed * val_permille) % 1000 < val_permille else "train"


# ----------------------------------------------------------------------------------------------------------------------
# workers

WORKER = {}                               # in a worker process: what its tokenizer is made of, and the tokenizer


def start_worker(meta, file):
    signal.signal(signal.SIGINT, signal.SIG_IGN)                           # Ctrl-C is for the main process
    WORKER["made of"] = meta, file


def encode(pieces, tokenizer=None):
    """[(text, last)] -> ids of all of them (n,) uint32, an end-of-text id after each that is last; and the number of each."""
    if tokenizer is None:
        if "tokenizer" not in WORKER:                                      # here, an error finds its way to the main process
            WORKER["tokenizer"] = restore_tokenizer(*WORKER["made of"])
        tokenizer = WORKER["tokenizer"]
    end = np.array([tokenizer.eot], dtype=np.uint32)
    ids = [np.concatenate((tokenizer.encode(text), end)) if last else tokenizer.encode(text) for text, last in pieces]
    return np.concatenate((end[:0], *ids)), np.array([len(i) for i in ids], dtype=np.int64)


class InProcess:
    """The one worker of --workers 1: this process."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def submit(self, function, pieces):
        future = Future()
        future.set_result(function(pieces, self.tokenizer))
        return future

    def shutdown(self, **options):
        pass


def pool(tokenizer, workers):
    if workers == 1:
        return InProcess(tokenizer)
    return ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (tokenizer.meta(), tokenizer.file))


# ----------------------------------------------------------------------------------------------------------------------
# bins


class BinWriter:
    """Appends ids to a file, from `tokens` ids on; an id that does not fit the dtype is an error, never wrapped round."""

    def __init__(self, path, dtype, tokens=0, documents=0, max_id=-1):
        self.dtype = np.dtype(dtype)
        self.tokens, self.documents, self.max_id = tokens, documents, max_id
        self.file = open(path, "r+b" if tokens else "wb")
        self.file.truncate(tokens * self.dtype.itemsize)
        self.file.seek(0, os.SEEK_END)

    def add(self, ids, documents=1):
        if not len(ids):
            return
        top = int(ids.max())
        if top > np.iinfo(self.dtype).max:
            raise DataError(f"token id {top} does not fit {self.dtype}")
        self.file.write(ids.astype(self.dtype).tobytes())
        self.tokens, self.documents, self.max_id = self.tokens + len(ids), self.documents + documents, max(self.max_id, top)

    def sync(self):
        """Put all on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def counts(self):
        return {"tokens": self.tokens, "documents": self.documents, "max_id": self.max_id}


def prepare(files, tokenizer, out, val_permille=10, text_key="text", workers=1, limit_tokens=None, max_errors=0, seed=0):
    """
    Write the folder `out` from files (or Sources), in their order; -> its meta. An equal one that is there already is kept, and
    one that was interrupted is completed. More than max_errors documents that cannot be used are an error.
    """
    out = Path(out)
    sources = list(files)
    if not (sources and isinstance(sources[0], Source)):
        sources = [Source("input", sources)]
    settings = {"val_permille": val_permille, "seed": seed, "text_key": text_key, "limit_tokens": limit_tokens}
    meta = {"format": FORMAT, "dtype": "uint16" if tokenizer.n_vocab <= 2 ** 16 else "uint32",
            "tokenizer": tokenizer.meta(), "settings": settings,
            "sources": [{"name": s.name, "weight": s.weight, "inputs": [fingerprint(p) for p in tqdm(
                s.files, desc=f"checksums of {s.name}", unit="file", disable=None, leave=False)]} for s in sources]}
    if (out / "meta.json").exists():
        old = read_meta(out)
        changed = [key for key in meta if without_counts(old.get(key)) != meta[key]]
        if changed:
            raise DataError(f"{out} was made from other {' and '.join(changed)}: choose another --out, or delete it first")
        print(f"{out} is there already, made from the same inputs")
        return old
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is no data folder: choose another --out")

    partial = out.with_name(out.name + ".partial")                         # renamed to `out` when complete
    state = begun(partial, meta)
    partial.mkdir(parents=True, exist_ok=True)
    writers = {split: BinWriter(partial / f"{split}.bin", meta["dtype"], **state["splits"][split]) for split in SPLITS}
    try:
        write(sources, tokenizer, writers, partial, state, meta, workers, max_errors)
    finally:
        for writer in writers.values():
            writer.file.close()
        if not any(counts["tokens"] for counts in state["splits"].values()):
            shutil.rmtree(partial)                                         # nothing to go on with
    for split, counts in state["splits"].items():
        if counts["tokens"] == 0:
            others = sum(c["documents"] for c in state["splits"].values())
            shutil.rmtree(partial, ignore_errors=True)
            raise DataError(f"no tokens written to {split}: the input has {others} documents that are not empty, and "
                            f"val takes {val_permille} of 1000 by hash; add documents or change --val-permille")
    meta["splits"] = {split: counts | {"sha256": file_hash(partial / f"{split}.bin")} for split, counts in state["splits"].items()}
    meta |= {"empty_documents": state["empty"], "bad_documents": state["bad"]}
    for source, (_, _, size, _) in zip(meta["sources"], state["at"]):
        source["text_bytes"] = size
    if tokenizer.file is not None:
        (partial / tokenizer.name).write_bytes(tokenizer.file)
    (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    (partial / "progress.json").unlink(missing_ok=True)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    report(out, meta)
    return meta


def without_counts(value):
    """meta["sources"] as it was before anything was counted."""
    if not isinstance(value, list):
        return value
    return [{key: v for key, v in source.items() if key != "text_bytes"} for source in value]


def begun(partial, meta):
    """How far the interrupted preparation in the folder `partial` is; the very start if there is none, or one of other inputs."""
    start = {"meta": meta, "at": [[0, 0, 0, False]] * len(meta["sources"]), "empty": 0, "bad": 0,
             "splits": {split: {"tokens": 0, "documents": 0, "max_id": -1} for split in SPLITS}}
    try:
        state = json.loads((partial / "progress.json").read_text(encoding="utf-8"))
        size = np.dtype(meta["dtype"]).itemsize
        fits = all((partial / f"{split}.bin").stat().st_size >= state["splits"][split]["tokens"] * size for split in SPLITS)
        if state["meta"] == meta and fits:
            print(f"going on with {partial}: {sum(c['tokens'] for c in state['splits'].values()):,} tokens are there")
            return state
    except (OSError, ValueError, KeyError, TypeError):
        pass
    shutil.rmtree(partial, ignore_errors=True)
    return start


def write(sources, tokenizer, writers, partial, state, meta, workers, max_errors):
    """From where `state` is to the end of the input, or to limit_tokens. `state` and progress.json follow what is written."""
    known = [i.get("bytes") for s in meta["sources"] for i in s["inputs"]]
    total = sum(known) if None not in known else None
    settings = meta["settings"]
    limit, text_before = settings["limit_tokens"], sum(at[2] for at in state["at"])
    encoders, waiting = pool(tokenizer, workers), deque()                  # (future, splits of its pieces, what comes after it)
    saved = begin = time.monotonic()

    def finish(future, splits, ends, after):
        """Write one batch; -> is the limit reached?"""
        nonlocal saved
        ids, lengths = future.result()
        count = len(lengths)
        if limit is not None:
            room = limit - sum(w.tokens for w in writers.values())
            reached = np.flatnonzero((np.cumsum(lengths) >= room) & ends)
            count = int(reached[0]) + 1 if len(reached) else count
        ids, splits, ends = ids[:lengths[:count].sum()], splits[:count], ends[:count]
        of_id = np.repeat(splits, lengths[:count])
        for number, split in enumerate(SPLITS):
            writers[split].add(ids[of_id == number], int((ends & (splits == number)).sum()))
        state.update(after, splits={split: writer.counts() for split, writer in writers.items()})
        full = limit is not None and sum(w.tokens for w in writers.values()) >= limit
        if full or time.monotonic() - saved > SAVE_EVERY:
            save()
            saved = time.monotonic()
        return full

    def save():
        for writer in writers.values():
            writer.sync()
        temporary = partial / "progress.json.tmp"
        temporary.write_text(json.dumps(state), encoding="utf-8")
        os.replace(temporary, partial / "progress.json")

    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenize", mininterval=0.5, disable=None) as bar:
        readers = [Reader(source, settings["text_key"], at, bar.update) for source, at in zip(sources, state["at"])]
        try:
            full = limit is not None and sum(w.tokens for w in writers.values()) >= limit  # of a run that ended just then
            for pieces, splits, after in () if full else batches(readers, tokenizer, settings, state, max_errors):
                ends = np.array([last for _, last in pieces], dtype=bool)
                waiting.append((encoders.submit(encode, pieces), np.array(splits, dtype=np.int64), ends, after))
                if len(waiting) > (0 if workers == 1 else 2 * workers):
                    if full := finish(*waiting.popleft()):
                        break
            while waiting and not full:
                full = finish(*waiting.popleft())
        except BrokenProcessPool:
            raise DataError("a worker process died (killed, or out of memory): the same command goes on from where it "
                            "was") from None
        finally:
            save()
            encoders.shutdown(wait=True, cancel_futures=True)
    seconds, text = time.monotonic() - begin, sum(at[2] for at in state["at"]) - text_before
    print(f"{text / 1e6:,.1f} MB of text in {seconds:,.1f} s, {text / 1e6 / seconds:,.1f} MB/s, {workers} worker(s)")


def batches(readers, tokenizer, settings, state, max_errors):
    """([(text, last)], number of the split of each, the state after them), each about PIECE characters."""
    pieces, splits, size, held = [], [], 0, []
    empty, bad = state["empty"], state["bad"]

    def after():
        return {"at": [list(reader.at) for reader in readers], "empty": empty, "bad": bad}

    for piece in mixed(readers):
        if isinstance(piece, Bad):
            bad += 1
            if bad > max_errors:
                raise DataError(piece.reason + (f" (number {bad}; --on-error skip --max-errors {max_errors})" if max_errors else
                                                "; --on-error skip passes over it"))
            print(f"skipped: {piece.reason}", file=sys.stderr)
            continue
        if not piece.text and piece.last and not held:
            empty += 1
            continue
        if not (tokenizer.cuttable or piece.last):                    # whole documents alone keep its ids
            held.append(piece.text)
            continue
        pieces.append(("".join([*held, piece.text]), piece.last))
        splits.append(SPLITS.index(split_of(piece.digest, settings["val_permille"], settings["seed"])))
        size, held = size + len(piece.text), []
        if size >= PIECE:
            yield pieces, splits, after()
            pieces, splits, size = [], [], 0
    yield pieces, splits, after()


def report(folder, meta):
    for split, counts in meta["splits"].items():
        print(f"{folder}/{split}.bin: {counts['tokens']:,} tokens of {counts['documents']:,} documents ({meta['dtype']})")
    print(f"tokenizer {meta['tokenizer']['name']}: ids below {meta['tokenizer']['n_vocab']:,}, largest used "
          f"{max(c['max_id'] for c in meta['splits'].values()):,}; {meta['empty_documents']} empty documents skipped"
          + f", {meta['bad_documents']} bad ones" * (meta["bad_documents"] > 0))
    taken = sum(source["text_bytes"] for source in meta["sources"])
    for source in meta["sources"]:
        if source["weight"] is not None:
            print(f"  {source['name']}: {source['text_bytes']:,} bytes of text, {source['text_bytes'] / taken:.1%} (weight "
                  f"{source['weight']:g})")


def read_meta(folder):
    path = Path(folder) / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format"]
    except FileNotFoundError:
        raise DataError(f"no data in {folder}: make it with  python prepare_data.py --input FILES --out {folder}"
                        "  (or --demo)") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not a meta.json of prepare_data.py") from None
    if version != FORMAT:
        raise DataError(f"{folder} has data format {version}, this version reads {FORMAT}: "
                        "delete it and prepare it again")
    if not {"dtype", "splits"} <= meta.keys():
        raise DataError(f"{path} is not a meta.json of prepare_data.py")
    return meta


class TokenBin:
    """
    One split of a data folder, memory-mapped. Window i of `seq_len` is tokens [i * seq_len, (i + 1) * seq_len + 1): windows
    share one token, as the last target of one is the first input of the next, and cross document borders. The last
    (n_tokens - 1) % seq_len tokens belong to no window.
    """

    def __init__(self, folder, split):
        self.path = Path(folder) / f"{split}.bin"
        self.meta = read_meta(folder)
        counts, dtype = self.meta["splits"][split], np.dtype(self.meta["dtype"])
        self.n_tokens, self.max_id, self.sha256 = counts["tokens"], counts["max_id"], counts["sha256"]
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self.n_tokens * dtype.itemsize:
            raise DataError(f"{self.path} has {size} bytes, but meta.json says {self.n_tokens} tokens of {dtype}, "
                            f"{self.n_tokens * dtype.itemsize} bytes: delete {self.path.parent} and prepare it again")
        self.tokens = np.memmap(self.path, dtype=dtype, mode="r")

    def n_windows(self, seq_len):
        n = (self.n_tokens - 1) // seq_len
        if n < 1:
            raise DataError(f"{self.path} has {self.n_tokens} tokens, too few for one window of seq_len={seq_len} "
                            f"(needs {seq_len + 1}): use more text or a shorter seq_len")
        return n

    def windows(self, indices, seq_len):
        """(len(indices), seq_len + 1) int64."""
        return np.stack([self.tokens[i * seq_len:(i + 1) * seq_len + 1] for i in map(int, indices)]).astype(np.int64)

    def tokenizer(self):
        """The tokenizer that made the bin; its local file, if it has one, lies beside the bin."""
        file = self.path.parent / self.meta["tokenizer"]["name"]
        return restore_tokenizer(self.meta["tokenizer"], file.read_bytes() if file.is_file() else None)


# ----------------------------------------------------------------------------------------------------------------------
# looking at a folder


def inspect(folder, samples=3, shown=200):
    """Print what is in a data folder."""
    meta = read_meta(folder)
    report(folder, meta)
    eot = meta["tokenizer"]["eot"]
    for split in SPLITS:
        data = TokenBin(folder, split)
        tokenizer, lengths, before, open_length = data.tokenizer(), Counter(), -1, 0
        starts = [0]
        for at in range(0, data.n_tokens, 1 << 24):
            ends = at + np.flatnonzero(np.asarray(data.tokens[at:at + (1 << 24)]) == eot)
            lengths.update(np.log2(np.maximum(1, np.diff(np.concatenate(([before], ends))) - 1)).astype(int).tolist())
            before = int(ends[-1]) if len(ends) else before
            starts += (ends[:samples - len(starts)] + 1).tolist() if len(starts) < samples else []
        print(f"\n{split}: length of documents in tokens, end of text not counted")
        most = max(lengths.values())
        for power in range(min(lengths), max(lengths) + 1):
            bar = "#" * round(40 * lengths[power] / most)
            print(f"  {2 ** power:>10,} - {2 ** (power + 1) - 1:<10,} {lengths[power]:>12,} {bar}")
        for start in [s for s in starts if s < data.n_tokens]:
            ids = np.asarray(data.tokens[start:start + shown])
            stop = np.flatnonzero(ids == eot)
            text = tokenizer.decode(ids[:stop[0]] if len(stop) else ids)
            print(f"  token {start:,}: {text[:shown]!r}{'' if len(stop) else ' ...'}")
    print(f"\nend of text: {eot}")


def verify(folder):
    """Compare a data folder with its meta.json: sizes, checksums, ids. DataError at the first difference."""
    meta = read_meta(folder)
    for split in SPLITS:
        data = TokenBin(folder, split)                                     # its size
        if data.tokenizer().n_vocab != meta["tokenizer"]["n_vocab"]:
            raise DataError(f"{folder}: its tokenizer is not the one of meta.json")
        top = max(int(data.tokens[at:at + (1 << 24)].max()) for at in range(0, data.n_tokens, 1 << 24))
        if top != data.max_id or top >= meta["tokenizer"]["n_vocab"]:
            raise DataError(f"{data.path}: its largest id is {top}; meta.json says {data.max_id}, "
                            f"of {meta['tokenizer']['n_vocab']}")
        if file_hash(data.path) != data.sha256:
            raise DataError(f"{data.path} has other contents than when it was written: delete {folder} and prepare it again")
        print(f"{data.path}: {data.n_tokens:,} tokens, as written")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["inspect"], ["verify"]):
        if len(argv) != 2:
            raise DataError(f"python prepare_data.py {argv[0]} data/NAME")
        return {"inspect": inspect, "verify": verify}[argv[0]](argv[1])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=[], metavar="PATH", help=f"files, folders or patterns: {KNOWN}; hf:org/name")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=PATH[,PATH...]:WEIGHT",
                        help="several inputs, mixed by weight (bytes of text) until the first is exhausted")
    parser.add_argument("--demo", action="store_true", help="the Python standard library's sources as input")
    parser.add_argument("--tokenizer", default="byte", help="byte (default), a tiktoken encoding, or a tokenizer file")
    parser.add_argument("--split-pattern", help=f"of a .tiktoken file: {', '.join(SPLIT_PATTERNS)}, or a regex")
    parser.add_argument("--out", help="folder to write (default with --demo: data/demo)")
    parser.add_argument("--text-key", default="text", help="of .jsonl and .parquet rows (default: text)")
    parser.add_argument("--val-permille", type=int, default=10, help="documents of 1000 held out (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="which documents are held out (default: 0)")
    parser.add_argument("--limit-tokens", type=int, help="stop after the document that reaches so many tokens")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenize (default: all cores)")
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="of documents that cannot be used")
    parser.add_argument("--max-errors", type=int, default=1000,
                        help="with --on-error skip: more than so many end it (default: 1000)")
    args = parser.parse_args(argv)
    if bool(args.demo) + bool(args.input) + bool(args.source) != 1:
        parser.error("give one of --demo, --input FILES_OR_DIRS and --source NAME=PATHS:WEIGHT")
    if not args.demo and not args.out:
        parser.error("--out is missing: the folder to write, such as data/NAME")
    if not 0 < args.val_permille < 1000:
        parser.error(f"--val-permille must be between 1 and 999, not {args.val_permille}")
    for name in ("workers", "limit_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    tokenizer = load_tokenizer(args.tokenizer, args.split_pattern)
    inputs = demo_files() if args.demo else [parse_source(s) for s in args.source] or find_files(args.input)
    prepare(inputs, tokenizer, args.out or "data/demo", args.val_permille, args.text_key, args.workers, args.limit_tokens,
            args.max_errors if args.on_error == "skip" else 0, args.seed)


if __name__ == "__main__":
    try:
        main()
    except (DataError, OSError) as e:
        sys.exit(f"prepare_data.py: {e}")
    except KeyboardInterrupt:
        sys.exit("prepare_data.py: interrupted; the same command goes on from where it was")
