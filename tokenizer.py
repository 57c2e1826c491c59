"""
Text -> ids and back: bytes, tiktoken's encodings, and tokenizer files of Hugging Face (byte-level BPE) and tiktoken.
"""

import base64
import hashlib
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import tiktoken

from errors import DataError

SPLIT_PATTERNS = {                        # how text is cut before byte pairs are merged; a .tiktoken file does not say
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                   r"|\s*[\r\n]+|\s+(?!\S)|\s+",         # Llama 3's too
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
HUB = {                                   # name: repository of its tokenizer.json, and `sha256` of the Tokenizer made of that
    "qwen3": ("Qwen/Qwen3-0.6B", "b9f4d080310f1cedfe3965004c27865a907e96ee922ad40e384b617a26031646"),
}
KEPT = Path(__file__).parent / "data" / "tokenizers"                      # where the files of HUB are
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
        # are the ids of a text those of its parts, when it is cut at documents.CUT? Known of these patterns
        self.cuttable = (encoding is None or name in tiktoken.list_encoding_names()
                         or encoding._pat_str in SPLIT_PATTERNS.values())
        self._encoding, self._normalize = encoding, normalize             # encoding None = bytes

    def encode(self, text):
        """Ids of a text, (n,) uint32, without end of text."""
        if self._encoding is None:
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
        if self._normalize:
            text = unicodedata.normalize(self._normalize, text)
        return np.concatenate([self._encoding.encode_to_numpy(part, disallowed_special=()) for part in parts(text)])

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
    The tokenizer called `name`: "byte", an encoding of tiktoken's, a key of HUB, or the path of a Hugging Face tokenizer.json
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
    if name in HUB:
        tokenizer = load_tokenizer(fetched(name))
        if tokenizer.sha256 != HUB[name][1]:
            raise DataError(f"{KEPT / name / 'tokenizer.json'} is not the tokenizer of {HUB[name][0]}, or is damaged: delete it, "
                            "or give its path to use it all the same")
        return tokenizer
    path = Path(name)
    if file is None:
        if not path.is_file() or path.suffix not in (".json", ".tiktoken"):
            raise DataError(f"unknown tokenizer {name!r}: byte, {', '.join([*HUB, *tiktoken.list_encoding_names()])}, "
                            "or the path of a tokenizer.json or .tiktoken file")
        file = path.read_bytes()
    try:
        if path.suffix == ".tiktoken":
            encoding, eot, normalize = read_tiktoken_file(path, file, split_pattern)
        else:
            encoding, eot, normalize = read_tokenizer_json(path, file)
    except (KeyError, TypeError, IndexError, AttributeError, UnicodeError, json.JSONDecodeError) as e:
        raise DataError(f"{path} is not a tokenizer file that can be read ({type(e).__name__}: {e})") from None
    return Tokenizer("tokenizer" + path.suffix, encoding.max_token_value + 1, eot, encoding_hash(encoding, normalize), encoding,
                     normalize, file, split_pattern)


def fetched(name):
    """The path of the tokenizer.json of a key of HUB, from the hub if it is not there yet."""
    path = KEPT / name / "tokenizer.json"
    if not path.exists():
        try:
            from huggingface_hub import hf_hub_download
            hf_hub_download(HUB[name][0], path.name, local_dir=path.parent)
        except Exception as e:                                            # the package, the network, the hub
            remedy = " (or pip install -e .[hf])" if isinstance(e, ImportError) else ""
            raise DataError(f"tokenizer {name!r} is not at {path} and cannot be fetched ({type(e).__name__}): put the "
                            f"tokenizer.json of {HUB[name][0]} there{remedy}") from None
    return str(path)


def restore_tokenizer(meta, file=None):
    """The tokenizer of a `Tokenizer.meta()`; `file` gives the bytes of its local file, if it has one."""
    tokenizer = load_tokenizer(meta["name"], meta["split_pattern"], file)
    if tokenizer.sha256 != meta["sha256"]:
        raise DataError(f"the tokenizer {meta['name']!r} found here is not the one the data was made with: "
                        f"sha256 {tokenizer.sha256[:12]}, not {meta['sha256'][:12]}")
    return tokenizer


def encoding_hash(encoding, normalize=None):
    h = hashlib.sha256(json.dumps([encoding._pat_str, normalize, sorted(encoding._special_tokens.items())]).encode())
    h.update(b"".join(b"%d %d " % (rank, len(token)) + token for token, rank in sorted(encoding._mergeable_ranks.items())))
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

    spelled = str.maketrans({c: chr(b) for c, b in byte_level_alphabet().items()})
    added = {t["content"]: t["id"] for t in spec.get("added_tokens", [])}
    spaces = [token for token in added if not token.strip()]               # Hugging Face's library finds them in any text
    need(not spaces, f"{spaces} are added tokens, which ordinary text contains")
    ranks = {token.translate(spelled).encode("latin-1"): i for token, i in model["vocab"].items() if token not in added}
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


def byte_tokenizer_json():
    """The tokenizer "byte" as a tokenizer.json of Hugging Face's: bytes that nothing merges, and end of text."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": 256, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
           "special": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": byte_level_alphabet(), "merges": []}
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
                       "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}, indent=1).encode()
