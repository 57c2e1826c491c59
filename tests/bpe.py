"""Small byte-level BPE tokenizers in the styles of GPT-2, Qwen and Llama 3, trained here by Hugging Face's library."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

SOURCES = "\n".join(p.read_text(encoding="utf-8") for p in sorted(Path(__file__).parents[1].glob("*.py")))
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
DIGITS = {"qwen": "", "llama3": "{1,3}"}                  # a piece of digits: one, or up to three
ADDED = {"gpt2": ["<|endoftext|>"], "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
         "llama3": ["<|begin_of_text|>", "<|end_of_text|>"]}


def train_bpe(style, vocab_size=600):
    """A Tokenizer of the library's, its merges learned from SOURCES. Added tokens come last, as in those models."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=style == "llama3"))
    if style == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(SPLIT.replace("DIGITS", DIGITS[style])), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if style == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(ADDED[style]), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([SOURCES], trainer)
    tokenizer.add_special_tokens(ADDED[style])
    tokenizer.encode_special_tokens = True                # special-token text in a document is text
    return tokenizer


def save_bpe(path, style="gpt2", edit=None):
    """Write the tokenizer.json; `edit` changes its contents before."""
    spec = json.loads(train_bpe(style).to_str())
    if edit:
        edit(spec)
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path
