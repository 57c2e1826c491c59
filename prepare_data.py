"""
Text -> token bins, tokenizers, and the reader of bins.

    python prepare_data.py --demo                                          the Python library's own sources, byte tokenizer
    python prepare_data.py --input FILES_OR_DIRS... --tokenizer byte --out data/NAME

writes data/NAME/train.bin and val.bin (bare token ids, uint16 where every id of the tokenizer fits, else uint32) and
meta.json, which says what they hold. A document is a .txt, .md or .py file, or a line of a .jsonl file. Its ids are
followed by one end-of-text id. Special-token text inside a document is text. Empty documents are skipped.

A document goes to train or val by a hash of its text: adding files never moves one, and copies land on one side.
The folder appears whole or not at all.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import unicodedata
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

FORMAT = 1                                # of the folder; a reader refuses any other
PLAIN = (".txt", ".md", ".py")            # one document a file
SUFFIXES = PLAIN + (".jsonl",)


class DataError(ValueError):
    """Input, tokenizer or bin that cannot be used. The message is one line: what, where, the remedy."""


# ----------------------------------------------------------------------------------------------------------------------
# tokenizers

SPLIT_PATTERNS = {                        # how text is cut before byte pairs are merged; a .tiktoken file does not say
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                   r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")       # the added token taken as end of text, in order


class Tokenizer:
    """
    name     as given to --tokenizer (a file: tokenizer.json or tokenizer.tiktoken, the name of its copy beside the bins)
    n_vocab  ids are 0 .. n_vocab - 1;  eot  end-of-text id
    sha256   of all that decides the ids
    file     bytes of a local tokenizer file, else None;  split_pattern  given with a .tiktoken file, else None
    """

    def __init__(self, name, n_vocab, eot, sha256, encoding=None, normalize=None, file=None, split_pattern=None):
        self.name, self.n_vocab, self.eot, self.sha256 = name, n_vocab, eot, sha256
        self.file, self.split_pattern = file, split_pattern
        self._encoding, self._normalize = encoding, normalize             # encoding None = bytes

    def encode(self, text):
        """Ids of a text, (n,) uint32, without end of text."""
        if self._encoding is None:
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
        if self._normalize:
            text = unicodedata.normalize(self._normalize, text)
        return np.concatenate([np.array(self._encoding.encode_ordinary(part), dtype=np.uint32) for part in parts(text)])

    def token_bytes(self, token):
        """The bytes of one id; none for end of text and other special ids, U+FFFD for an id that is not in use."""
        if self._encoding is None:
            return bytes([token]) if token < 256 else b"" if token == self.eot else "\ufffd".encode()
        if token in self._encoding._special_tokens.values():
            return b""
        try:
            return self._encoding.decode_single_token_bytes(token)
        except KeyError:
            return "\ufffd".encode()

    def decode(self, ids):
        return b"".join(self.token_bytes(int(i)) for i in ids).decode(errors="replace")

    def meta(self):
        """What identifies the tokenizer, for meta.json and checkpoints; `restore_tokenizer` is the way back."""
        return {key: getattr(self, key) for key in ("name", "n_vocab", "eot", "sha256", "split_pattern")}


def parts(text, limit=500_000):
    """
    The text in parts. It is cut only inside of more than `limit` white-space characters in a row: a million of them
    overflow the stack of tiktoken's regex engine.
    """
    runs = re.finditer(r"\s+", text) if len(text) > limit else ()
    cuts = [0, *(at for run in runs for at in range(run.start() + limit, run.end(), limit)), len(text)]
    return [text[start:stop] for start, stop in zip(cuts, cuts[1:])]


def load_tokenizer(name, split_pattern=None, file=None):
    """
    The tokenizer called `name`: "byte", an encoding of tiktoken's, or the path of a Hugging Face tokenizer.json
    (byte-level BPE) or of a .tiktoken ranks file, which needs `split_pattern` (a key of SPLIT_PATTERNS or a regex).
    `file` gives the bytes of such a file where it is not on disk (they are kept in checkpoints).
    """
    if name == "byte":
        return Tokenizer("byte", 257, 256, hashlib.sha256(b"byte").hexdigest())
    if name in tiktoken.list_encoding_names():
        try:
            encoding = tiktoken.get_encoding(name)
        except (OSError, ValueError) as e:                                # no network (requests' are OSErrors), or damage
            raise DataError(f"tokenizer {name!r} is not in tiktoken's cache and cannot be fetched "
                            f"({type(e).__name__}): set TIKTOKEN_CACHE_DIR to a folder that holds it, or use "
                            "--tokenizer byte or a local tokenizer.json") from None
        return Tokenizer(name, encoding.n_vocab, encoding.eot_token, encoding_hash(encoding), encoding)
    path = Path(name)
    if file is None:
        if not path.is_file() or path.suffix not in (".json", ".tiktoken"):
            raise DataError(f"unknown tokenizer {name!r}: byte, {', '.join(tiktoken.list_encoding_names())}, "
                            "or the path of a tokenizer.json or .tiktoken file")
        file = path.read_bytes()
    try:
        if path.suffix == ".tiktoken":
            encoding, eot, normalize = read_tiktoken_file(path, file, split_pattern)
        else:
            encoding, eot, normalize = read_tokenizer_json(path, file)
    except (KeyError, TypeError, IndexError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise DataError(f"{path} is not a tokenizer file that can be read ({type(e).__name__}: {e})") from None
    return Tokenizer("tokenizer" + path.suffix, encoding.max_token_value + 1, eot, encoding_hash(encoding, normalize), encoding,
                     normalize, file, split_pattern)


def restore_tokenizer(meta, file=None):
    """The tokenizer of a `Tokenizer.meta()`; `file` gives the bytes of its local file, if it has one."""
    tokenizer = load_tokenizer(meta["name"], meta["split_pattern"], file)
    if tokenizer.sha256 != meta["sha256"]:
        raise DataError(f"the tokenizer {meta['name']!r} found here is not the one the data was made with: "
                        f"sha256 {tokenizer.sha256[:12]}, not {meta['sha256'][:12]}")
    return tokenizer


def encoding_hash(encoding, normalize=None):
    h = hashlib.sha256(json.dumps([encoding._pat_str, normalize, sorted(encoding._special_tokens.items())]).encode())
    for token, rank in sorted(encoding._mergeable_ranks.items()):
        h.update(b"%d %d " % (rank, len(token)) + token)
    return h.hexdigest()


def read_tiktoken_file(path, data, split_pattern):
    """-> (Encoding, end-of-text id, None); end of text is the first id after the ranks."""
    if split_pattern is None:
        raise DataError(f"{path} holds no split pattern: add --split-pattern {'|'.join(SPLIT_PATTERNS)} or a regex")
    try:
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in map(bytes.split, data.splitlines())}
    except ValueError:
        raise DataError(f"{path} is not a .tiktoken file (lines of 'base64 rank'), or is cut short") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([b]) in ranks for b in range(256)):
        raise DataError(f"{path}: the ranks must be 0 .. n-1 and hold every single byte; the file may be cut short")
    eot = len(ranks)
    pattern = SPLIT_PATTERNS.get(split_pattern, split_pattern)
    return make_encoding(path, pattern, ranks, {"<|endoftext|>": eot}), eot, None


def read_tokenizer_json(path, data):
    """
    A Hugging Face tokenizer.json with byte-level BPE (GPT-2, Qwen, Llama 3) -> (Encoding, end-of-text id, normalisation).
    Whatever would give other ids than Hugging Face's library is refused with the reason.
    """
    def need(ok, reason):
        if not ok:
            raise DataError(f"{path}: only byte-level BPE can be used, but {reason}")

    spec = json.loads(data)
    model, normalizer = spec["model"], spec.get("normalizer")
    need(model.get("type", "BPE") == "BPE", f"model.type is {model.get('type')!r}")
    for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        need(not model.get(option), f"it uses {option}")
    need(normalizer is None or normalizer["type"] in ("NFC", "NFKC", "NFD", "NFKD"), f"its normalizer is {normalizer}")
    steps = spec["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    need(steps[-1].get("type") == "ByteLevel", "its pre_tokenizer does not end in ByteLevel")
    need(not steps[-1].get("add_prefix_space"), "ByteLevel adds a prefix space")
    if len(steps) == 1:
        need(steps[0].get("use_regex", True), "it does not split text")
        pattern = SPLIT_PATTERNS["gpt2"]
    else:
        need(len(steps) == 2 and steps[0]["type"] == "Split" and steps[0]["behavior"] == "Isolated"
             and not steps[0].get("invert") and not steps[1].get("use_regex", True), f"its pre_tokenizer is {steps}")
        pattern = steps[0]["pattern"]["Regex"]

    byte_of = byte_level_alphabet()
    added = {t["content"]: t["id"] for t in spec.get("added_tokens", [])}
    spaces = [token for token in added if not token.strip()]               # Hugging Face's library finds them in any text
    need(not spaces, f"{spaces} are added tokens, which ordinary text contains")
    ranks = {bytes(byte_of[c] for c in token): i for token, i in model["vocab"].items() if token not in added}
    need(all(bytes([b]) in ranks for b in range(256)), "its vocabulary lacks single bytes")
    merged = ["".join(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    ids = [model["vocab"][token] for token in merged]
    need(ids == sorted(ids), "its merges are not in the order of their ids")
    made = {*ids, *(ranks[bytes([b])] for b in range(256))}
    need(made.issuperset(ranks.values()), "its vocabulary has tokens that no merge makes")
    eot = next((added[t] for t in END_OF_TEXT if t in added), None)
    need(eot is not None, f"it has no end-of-text token (one of {', '.join(END_OF_TEXT)})")
    return make_encoding(path, pattern, ranks, added), eot, normalizer and normalizer["type"]


def make_encoding(path, pattern, ranks, special):
    try:
        return tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except ValueError as e:
        raise DataError(f"{path}: {str(e).splitlines()[0]}") from None


def byte_level_alphabet():
    """character -> byte of GPT-2's printable spelling of bytes: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


# ----------------------------------------------------------------------------------------------------------------------
# documents


def find_files(inputs):
    """The files under the inputs (files, or folders searched for SUFFIXES), in a fixed order, each once."""
    found = {}
    for item in map(Path, inputs):
        if item.is_dir():
            inside = sorted(p for p in item.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            if not inside:
                raise DataError(f"{item} holds no {', '.join(SUFFIXES)} files")
            found.update(dict.fromkeys(inside))
        elif not item.exists():
            raise DataError(f"no such file or folder: {item}")
        elif item.suffix not in SUFFIXES:
            raise DataError(f"{item}: cannot read {item.suffix or 'files without an ending'}; known: {', '.join(SUFFIXES)}")
        else:
            found[item] = None
    return list(found)


def documents(path, text_key):
    """The texts of one file, one at a time. A byte order mark at the start is no text."""
    if path.suffix in PLAIN:
        yield decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), path)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            where = f"{path}:{number}"
            line = decode(line, where)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:                      # too long a number, too deep a nesting
                raise DataError(f"{where}: not JSON ({e})") from None
            if not isinstance(row, dict) or not isinstance(row.get(text_key), str):
                raise DataError(f"{where}: no text under {text_key!r} (--text-key): {line[:60].strip()}")
            try:
                row[text_key].encode("utf-8")
            except UnicodeEncodeError:
                raise DataError(f"{where}: the text holds half of a surrogate pair, which is no character") from None
            yield row[text_key]


def decode(data, where):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"{where}: not UTF-8 (byte {e.start})") from None


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


def split_of(utf8, val_permille):
    """ "val" for about val_permille of 1000 texts, by a hash of the text alone."""
    return "val" if int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest(), "big") % 1000 < val_permille else "train"


# ----------------------------------------------------------------------------------------------------------------------
# bins


class BinWriter:
    """Appends ids to a file; an id that does not fit the dtype is an error, never wrapped round."""

    def __init__(self, path, dtype):
        self.file, self.dtype = open(path, "wb"), np.dtype(dtype)
        self.hash, self.tokens, self.documents, self.max_id = hashlib.sha256(), 0, 0, -1

    def add(self, ids):
        top = int(ids.max())
        if top > np.iinfo(self.dtype).max:
            raise DataError(f"token id {top} does not fit {self.dtype}")
        data = ids.astype(self.dtype).tobytes()
        self.file.write(data)
        self.hash.update(data)
        self.tokens, self.documents, self.max_id = self.tokens + len(ids), self.documents + 1, max(self.max_id, top)

    def close(self):
        """Flush to disk; -> the split's entry in meta.json."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"tokens": self.tokens, "documents": self.documents, "max_id": self.max_id, "sha256": self.hash.hexdigest()}


def prepare(files, tokenizer, out, val_permille=10, text_key="text"):
    """Write the folder `out` from files, in their order; -> its meta. An equal one that is there already is kept."""
    out = Path(out)
    settings = {"val_permille": val_permille, "text_key": text_key}
    inputs = [{"path": str(p), "bytes": p.stat().st_size, "sha256": file_hash(p)} for p in files]
    meta = {"format": FORMAT, "dtype": "uint16" if tokenizer.n_vocab <= 2 ** 16 else "uint32",
            "tokenizer": tokenizer.meta(), "settings": settings, "inputs": inputs}
    if (out / "meta.json").exists():
        old = read_meta(out)
        changed = [key for key in meta if old.get(key) != meta[key]]
        if changed:
            raise DataError(f"{out} was made from other {' and '.join(changed)}: choose another --out, or delete it first")
        print(f"{out} is there already, made from the same inputs")
        return old
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is no data folder: choose another --out")

    partial = out.with_name(out.name + ".partial")                         # renamed to `out` when complete
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        writers = {split: BinWriter(partial / f"{split}.bin", meta["dtype"]) for split in ("train", "val")}
        empty = 0
        with tqdm(total=sum(i["bytes"] for i in inputs), unit="B", unit_scale=True, desc="tokenize", mininterval=0.5,
                  disable=None) as bar:
            for path, info in zip(files, inputs):
                for text in documents(path, text_key):
                    utf8 = text.encode("utf-8")
                    if not utf8:
                        empty += 1
                        continue
                    ids = np.append(tokenizer.encode(text), np.uint32(tokenizer.eot))
                    writers[split_of(utf8, val_permille)].add(ids)
                bar.update(info["bytes"])
        meta["splits"] = {split: writer.close() for split, writer in writers.items()}
        meta["empty_documents"] = empty
        for split, counts in meta["splits"].items():
            if counts["tokens"] == 0:
                others = sum(c["documents"] for c in meta["splits"].values())
                raise DataError(f"no tokens written to {split}: the input has {others} documents that are not empty, and "
                                f"val takes {val_permille} of 1000 by hash; add documents or change --val-permille")
        if tokenizer.file is not None:
            (partial / tokenizer.name).write_bytes(tokenizer.file)
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for split, counts in meta["splits"].items():
        print(f"{out}/{split}.bin: {counts['tokens']:,} tokens of {counts['documents']:,} documents ({meta['dtype']})")
    print(f"tokenizer {tokenizer.name}: ids below {tokenizer.n_vocab:,}, largest used "
          f"{max(c['max_id'] for c in meta['splits'].values()):,}; {empty} empty documents skipped")
    return meta


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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=[], metavar="PATH", help=f"files or folders: {', '.join(SUFFIXES)}")
    parser.add_argument("--demo", action="store_true", help="the Python standard library's sources as input")
    parser.add_argument("--tokenizer", default="byte", help="byte (default), a tiktoken encoding, or a tokenizer file")
    parser.add_argument("--split-pattern", help=f"of a .tiktoken file: {', '.join(SPLIT_PATTERNS)}, or a regex")
    parser.add_argument("--out", help="folder to write (default with --demo: data/demo)")
    parser.add_argument("--text-key", default="text", help="of .jsonl rows (default: text)")
    parser.add_argument("--val-permille", type=int, default=10, help="documents of 1000 held out (default: 10)")
    args = parser.parse_args(argv)
    if args.demo == bool(args.input):
        parser.error("give either --demo or --input FILES_OR_DIRS")
    if not args.demo and not args.out:
        parser.error("--out is missing: the folder to write, such as data/NAME")
    if not 0 < args.val_permille < 1000:
        parser.error(f"--val-permille must be between 1 and 999, not {args.val_permille}")
    tokenizer = load_tokenizer(args.tokenizer, args.split_pattern)
    files = demo_files() if args.demo else find_files(args.input)
    prepare(files, tokenizer, args.out or "data/demo", args.val_permille, args.text_key)


if __name__ == "__main__":
    try:
        main()
    except (DataError, OSError) as e:
        sys.exit(f"prepare_data.py: {e}")
