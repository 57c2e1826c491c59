"""
The documents of files and of data sets: .txt, .md and source code (one a file), .jsonl (one a line), .parquet (one a row);
all but .parquet also as .gz and .zst; and hf:org/name[:config][@revision] from the Hugging Face hub.

Everything streams: memory does not grow with the size of a file, nor with that of a document in a file of its own. A
document longer than PIECE is handed out in pieces, cut where no tokenizer with a pattern of SPLIT_PATTERNS merges across.
"""

import codecs
import gzip
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from errors import DataError

CODE = (".py .c .h .cc .cpp .hpp .cu .cuh .java .js .ts .go .rs .rb .php .cs .swift .kt .scala .sh .sql .html .css .lua .r .jl "
        ".hs .ml .tex .rst").split()
PLAIN = (".txt", ".md", *CODE)            # one document a file
ROWS = (".jsonl", ".parquet")             # one document a row
COMPRESSED = (".gz", ".zst")
KNOWN = ".txt, .md, source code, .jsonl (each also .gz or .zst) and .parquet"
PIECE = 1 << 20                           # characters
BLOCK = 1 << 20                           # bytes read at once
CUT = re.compile(r"(?<=[^\W_])(?= [^\W_])|(?<=\S)\n(?=[^\W_])")         # between letters or digits: before a space, after a line
BOM = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """A document, or a part of one: all parts but that with last=True are followed by the next."""
    text: str
    size: int                             # of the text in UTF-8
    digest: bytes                         # of the whole document, which decides its split
    last: bool = True


class Bad(NamedTuple):
    """In place of a document that cannot be used: where it stands and why."""
    reason: str


def digest(utf8):
    return hashlib.blake2b(utf8, digest_size=8)


# ----------------------------------------------------------------------------------------------------------------------
# files


def kind(path):
    """The ending that says what is in the file, whatever it is compressed with."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def is_known(path):
    return kind(path) in PLAIN + ROWS and not (kind(path) == ".parquet" and path.suffix in COMPRESSED)


def find_files(inputs):
    """The files that the inputs name (files, folders, patterns with *, or hf:...), in a fixed order, each once."""
    found = {}
    for item in inputs:
        if str(item).startswith("hf:"):
            found[str(item)] = None
            continue
        path = Path(item)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if is_known(p) and p.is_file())
            if not inside:
                raise DataError(f"{item} holds no {KNOWN} files")
            found.update(dict.fromkeys(inside))
        elif not path.exists() and any(c in str(item) for c in "*?["):
            inside = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not inside:
                raise DataError(f"no file matches {item}")
            found.update(dict.fromkeys(find_files(inside)))
        elif not path.exists():
            raise DataError(f"no such file or folder: {item}")
        elif not is_known(path):
            raise DataError(f"{item}: cannot read {path.suffix or 'files without an ending'}; known: {KNOWN}")
        else:
            found[path] = None
    return list(found)


def extra(module, what):
    """A package that only some inputs need."""
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        raise DataError(f"{what} needs the package {module.partition('.')[0]}: pip install -e .[data]") from None


def blocks(path, tick=lambda n: None):
    """The bytes of a file, uncompressed, some at a time; `tick` is told of the bytes read from disk."""
    raw = path.open("rb")
    with raw:
        if path.suffix == ".zst":
            yield from unzstd(path, raw, tick)
            return
        stream, before = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw, 0
        try:
            while block := stream.read(BLOCK):
                tick(raw.tell() - before)
                before = raw.tell()
                yield block
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise DataError(f"{path}: not a gzip file, or cut short ({e})") from None


def unzstd(path, raw, tick):
    """Frames one after another. The stream reader of the library ends without a word inside of a cut frame."""
    zstandard = extra("zstandard", str(path))
    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    while data := raw.read(BLOCK // 4):
        tick(len(data))
        while data:
            try:
                block = frame.decompress(data)
            except zstandard.ZstdError as e:
                raise DataError(f"{path}: not a zstd file ({e})") from None
            begun, data = True, b""
            if block:
                yield block
            if frame.eof:
                data, frame, begun = frame.unused_data, zstandard.ZstdDecompressor().decompressobj(), False
    if begun:
        raise DataError(f"{path}: cut short: it ends inside of a zstd frame")


def lines(parts):
    """Lines of a stream of bytes, without their ends."""
    held = []
    for part in parts:
        first, *more = part.split(b"\n")
        held.append(first)
        for line in more:
            yield b"".join(held)
            held = [line]
    if last := b"".join(held):
        yield last


# ----------------------------------------------------------------------------------------------------------------------
# documents


def documents(path, text_key, tick=lambda n: None):
    """The Pieces of one file (Bad in place of what is no document), one at a time. A byte order mark at a start is no text."""
    if isinstance(path, str):
        return hub_rows(path, text_key)
    if kind(path) == ".jsonl":
        return json_rows(path, text_key, tick)
    if kind(path) == ".parquet":
        return parquet_rows(path, text_key, tick)
    return plain(path, tick)


def whole(text, utf8):
    """The Pieces of a text in memory."""
    key = digest(utf8).digest()
    if len(text) <= PIECE:
        yield Piece(text, len(utf8), key)
        return
    yield from numbered(cut(text[at:at + PIECE] for at in range(0, len(text), PIECE)), key)


def numbered(texts, key):
    """Pieces of consecutive texts of one document."""
    before = None
    for text in texts:
        if before is not None:
            yield Piece(before, len(before.encode("utf-8")), key, last=False)
        before = text
    yield Piece(before, len(before.encode("utf-8")), key)


def cut(texts):
    """The same text in other parts: at least PIECE long, and cut where tokens end (the last may be shorter)."""
    held, size = [], 0
    for text in texts:
        seam = held[-1][-1:] if held else ""
        held.append(text)
        size += len(text)
        if size < PIECE:
            continue
        place = last_cut(seam + text) - len(seam)
        if place > 0:
            rest = text[place:]
            yield "".join(held)[:size - len(rest)]
            held, size = [rest], len(rest)
    yield "".join(held)


def last_cut(text):
    """Where the last CUT of a text is; 0 if there is none."""
    for start in (max(0, len(text) - 4096), 0):                            # mostly there is one near the end
        places = [m.end() for m in CUT.finditer(text, start)]
        if places:
            return places[-1]
    return 0


def plain(path, tick):
    head = []
    for block in blocks(path):
        head.append(block)
        if sum(map(len, head)) > PIECE:
            break
    else:
        tick(path.stat().st_size)
        utf8 = b"".join(head).removeprefix(BOM)
        try:
            yield from whole(utf8.decode("utf-8"), utf8)
        except UnicodeDecodeError as e:
            yield Bad(f"{path}: not UTF-8 (byte {e.start})")
        return
    key, decoder = digest(b""), codecs.getincrementaldecoder("utf-8")()    # too long to hold: read it twice
    try:
        for text in decoded(path, decoder):
            key.update(text.encode("utf-8"))
    except UnicodeDecodeError as e:
        yield Bad(f"{path}: not UTF-8 ({e.reason})")
        return
    yield from numbered(cut(decoded(path, codecs.getincrementaldecoder("utf-8")(), tick)), key.digest())


def decoded(path, decoder, tick=lambda n: None):
    first = True
    for block in blocks(path, tick):
        yield decoder.decode(block.removeprefix(BOM) if first else block)
        first = False
    yield decoder.decode(b"", final=True)


def json_rows(path, text_key, tick):
    for number, line in enumerate(lines(blocks(path, tick)), 1):
        line, where = line.removeprefix(BOM) if number == 1 else line, f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as e:
            yield Bad(f"{where}: not UTF-8 (byte {e.start})")
        except (ValueError, RecursionError) as e:                          # too long a number, too deep a nesting
            yield Bad(f"{where}: not JSON ({e})")
        else:
            shown = line[:60].decode("utf-8", errors="replace").strip()
            yield from checked(row.get(text_key) if isinstance(row, dict) else None, where, text_key, shown)


def parquet_rows(path, text_key, tick):
    parquet = extra("pyarrow.parquet", str(path))
    try:
        file = parquet.ParquetFile(path)
        if text_key not in file.schema_arrow.names:
            raise DataError(f"{path}: no column {text_key!r} (--text-key); it has {', '.join(file.schema_arrow.names)}")
        number, size = 0, path.stat().st_size // max(1, file.num_row_groups)
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(256, row_groups=[group], columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield from checked(value, f"{path}: row {number}", text_key, repr(value)[:60])
            tick(size)
    except (OSError, ValueError) as e:                                     # pyarrow's errors are of these kinds
        if isinstance(e, DataError):
            raise
        raise DataError(f"{path}: not a parquet file, or cut short ({str(e).splitlines()[0]})") from None


def hub_rows(name, text_key):
    """Rows of hf:org/name[:config][@revision], split "train"; org/name may be a local folder in the hub's layout."""
    datasets = extra("datasets", name)
    address, _, revision = name.removeprefix("hf:").partition("@")
    address, _, config = address.partition(":")
    try:
        rows = datasets.load_dataset(address, config or None, split="train", streaming=True, revision=revision or None)
    except Exception as e:                                                 # of a dozen packages
        raise DataError(f"{name}: cannot be opened ({type(e).__name__}: {str(e).splitlines()[0][:200]})") from None
    for number, row in enumerate(rows, 1):
        if text_key not in row:
            raise DataError(f"{name}: no column {text_key!r} (--text-key); it has {', '.join(row)}")
        yield from checked(row[text_key], f"{name}: row {number}", text_key, repr(row[text_key])[:60])


def checked(value, where, text_key, shown):
    if not isinstance(value, str):
        yield Bad(f"{where}: no text under {text_key!r} (--text-key): {shown}")
        return
    try:
        utf8 = value.encode("utf-8")
    except UnicodeEncodeError:
        yield Bad(f"{where}: the text holds half of a surrogate pair, which is no character")
        return
    yield from whole(value, utf8)
