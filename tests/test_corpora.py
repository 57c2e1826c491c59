"""Preparing real corpora: formats, damage, long documents, workers, interruptions, mixtures, and looking at what was made."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import documents as documents_file
import prepare_data
from bpe import SOURCES, save_bpe
from documents import Bad, cut, documents, find_files
from errors import DataError
from prepare_data import Source, TokenBin, main, prepare, read_meta
from test_prepare_data import NASTY, ROOT, command, prepared, texts_of, write_texts
from tokenizer import load_tokenizer

BYTE = load_tokenizer("byte")


def rows(n=200, start=0):
    return [f"row {i} says " + "word " * (i % 7) + "end" for i in range(start, start + n)]


def jsonl(texts):
    return "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts).encode()


def zst(data, frames=3):
    """`data` as several frames, one after another, as parallel compressors write them."""
    size = -(-len(data) // frames)
    return b"".join(zstandard.compress(data[i:i + size]) for i in range(0, len(data), size))


def parquet(path, texts, **columns):
    pyarrow.parquet.write_table(pyarrow.table({"text": texts} | columns), path, row_group_size=64)
    return path


def same_folders(a, b):
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes(), path.name


# ---- formats


def test_every_format_gives_the_same_documents(tmp_path):
    texts = rows()
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(texts)) + gzip.compress(b'{"text": "a second member"}\n'))
    (tmp_path / "c.jsonl.zst").write_bytes(zst(jsonl(texts)))
    parquet(tmp_path / "d.parquet", texts, url=["x"] * len(texts))
    found = {p.name[0]: [piece.text for piece in documents(p, "text")] for p in find_files([tmp_path])}
    assert found == {"a": texts, "b": [*texts, "a second member"], "c": texts, "d": texts}
    for name, data in (("e.txt.gz", gzip.compress("naïve 日本".encode())), ("f.py.zst", zst("naïve 日本".encode()))):
        (tmp_path / name).write_bytes(data)
        assert [piece.text for piece in documents(tmp_path / name, "text")] == ["naïve 日本"]


def test_patterns_and_source_code(tmp_path):
    for name in ("a1.cpp", "a2.rs", "b1.cpp", "c.parquet.gz"):
        (tmp_path / name).write_text("x")
    assert [p.name for p in find_files([tmp_path / "a*"])] == ["a1.cpp", "a2.rs"]
    assert [p.name for p in find_files([tmp_path / "*.cpp", tmp_path / "a2.rs"])] == ["a1.cpp", "b1.cpp", "a2.rs"]
    with pytest.raises(DataError, match="no file matches .*/z\\*"):
        find_files([tmp_path / "z*"])
    with pytest.raises(DataError, match="cannot read .gz; known: .*parquet"):
        find_files([tmp_path / "c.parquet.gz"])


def hub_folder(folder, texts):
    """A data set as the hub lays it out."""
    (folder / "data").mkdir(parents=True)
    parquet(folder / "data/train-00000-of-00002.parquet", texts[:90])
    parquet(folder / "data/train-00001-of-00002.parquet", texts[90:])
    return folder


def test_hub_data_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = rows()
    address = f"hf:{hub_folder(tmp_path / 'org/name', texts)}"
    (tmp_path / "local.jsonl").write_bytes(jsonl(texts))
    prepared([address], tmp_path / "a")
    prepared([tmp_path / "local.jsonl"], tmp_path / "b")
    for split in ("train.bin", "val.bin"):
        assert (tmp_path / "a" / split).read_bytes() == (tmp_path / "b" / split).read_bytes()
    assert read_meta(tmp_path / "a")["sources"][0]["inputs"] == [{"path": address}]
    with pytest.raises(DataError, match="hf:.*/nowhere: cannot be opened"):
        prepared([f"hf:{tmp_path / 'nowhere'}"], tmp_path / "c")
    with pytest.raises(DataError, match="no column 'body' .*it has text"):
        prepared([address], tmp_path / "c", text_key="body")


@pytest.mark.parametrize("name", ["x.jsonl.zst", "x.parquet", "hf:org/name"])
def test_missing_packages_are_named(tmp_path, name, monkeypatch):
    for package in ("zstandard", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    path = name if name.startswith("hf:") else tmp_path / name
    if path != name:
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"needs the package (zstandard|pyarrow|datasets): pip install -e .\[data\]"):
        list(documents(path, "text"))


@pytest.mark.parametrize("name, whole", [("a.jsonl.gz", gzip.compress(jsonl(rows()))), ("a.jsonl.zst", zst(jsonl(rows()))),
                                         ("a.parquet", None)])
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_broken_archives_are_named(tmp_path, name, whole, damage):
    path = tmp_path / name
    whole = parquet(path, rows()).read_bytes() if whole is None else whole
    path.write_bytes(whole[:len(whole) - 50] if damage == "cut" else b"this is no archive at all" * 10)
    with pytest.raises(DataError, match=f"{path}: .*(cut short|not a)") as e:
        prepared([path, *write_texts(tmp_path)], tmp_path / "out")
    assert "\n" not in str(e.value) and not (tmp_path / "out").exists()


def test_a_missing_column_names_the_others(tmp_path):
    with pytest.raises(DataError, match="no column 'body' .*it has text, url"):
        list(documents(parquet(tmp_path / "a.parquet", ["x"], url=["y"]), "body"))


# ---- bad documents


def test_skipped_errors_are_counted_and_limited(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    good = rows(100)
    path.write_bytes(jsonl(good[:50]) + b'{"text": \n{"text": 3}\n"\xff"\n' + jsonl(good[50:]))
    (tmp_path / "b.parquet").write_bytes(parquet(tmp_path / "b.parquet", ["fine", None]).read_bytes())
    (tmp_path / "c.txt").write_bytes(b"ab\xff")
    arguments = ["--input", tmp_path, "--out", tmp_path / "out", "--val-permille", 200, "--workers", 1]
    for options, words in (([], "a.jsonl:51: not JSON .*; --on-error skip passes over it"),
                           (["--on-error", "skip", "--max-errors", 4], r"c.txt: not UTF-8 .*number 5; --on-error skip --max-errors 4")):
        with pytest.raises(DataError, match=words):
            main([str(a) for a in arguments + options])
        assert not (tmp_path / "out").exists()
    capsys.readouterr()
    main([str(a) for a in arguments + ["--on-error", "skip", "--max-errors", 5]])
    said = capsys.readouterr()
    assert texts_of(tmp_path / "out") == sorted([*good, "fine"]) and read_meta(tmp_path / "out")["bad_documents"] == 5
    assert "5 bad ones" in said.out and [line.split(": ")[0] for line in said.err.splitlines()] == ["skipped"] * 5
    assert f"{path}:51" in said.err and f"{path}:53: not UTF-8" in said.err and "b.parquet: row 2" in said.err


# ---- long documents


def long_text(seed, length):
    rng, out = random.Random(seed), []
    pool = [*SOURCES.split("\n")[:400], NASTY, "日本語\nテスト", "it's 'll x\n's y", "a\u0301\n\u0301b", "12\n34 5", ".\nA", "x\r\ny", " \nz"]
    while sum(map(len, out)) < length:
        out.append(rng.choice(pool) + rng.choice(["\n", " ", "\n\n", "", "  ", "\t"]))
    return "".join(out)


@pytest.mark.parametrize("style", ["byte", "gpt2", "qwen", "llama3"])
def test_pieces_have_the_ids_of_the_whole(tmp_path, style, monkeypatch):
    tokenizer = BYTE if style == "byte" else load_tokenizer(str(save_bpe(tmp_path / "tokenizer.json", style)))
    assert tokenizer.cuttable
    monkeypatch.setattr(documents_file, "PIECE", 60)
    for seed in range(3):
        text = long_text(seed, 40_000)
        pieces = list(cut(text[i:i + 37] for i in range(0, len(text), 37)))
        assert "".join(pieces) == text and len(pieces) > 150
        assert np.array_equal(np.concatenate([tokenizer.encode(p) for p in pieces]), tokenizer.encode(text))


@pytest.mark.parametrize("pattern", ["gpt2", r"\S+\n?|\s+"])
def test_a_long_document_is_one_document(tmp_path, pattern, monkeypatch):
    """However it is stored; also with a pattern that is not known to allow cuts, when it is put together again."""
    from test_prepare_data import toy_ranks, write_ranks
    tokenizer = load_tokenizer(str(write_ranks(tmp_path / "toy.tiktoken", toy_ranks())), pattern)
    assert tokenizer.cuttable == (pattern == "gpt2")
    text, short = long_text(5, 30_000), write_texts(tmp_path)
    (tmp_path / "long.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "long.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "long.jsonl").write_bytes(jsonl([text]))
    prepared([tmp_path / "long.txt", *short], tmp_path / "whole", tokenizer)
    monkeypatch.setattr(documents_file, "PIECE", 500)
    monkeypatch.setattr(documents_file, "BLOCK", 701)                      # inside of characters too
    monkeypatch.setattr(prepare_data, "PIECE", 1000)
    for name in ("long.txt", "long.txt.gz", "long.jsonl"):
        meta = prepared([tmp_path / name, *short], tmp_path / f"out-{name}", tokenizer)
        assert sum(s["documents"] for s in meta["splits"].values()) == 41 and text in texts_of(tmp_path / f"out-{name}")
        for split in ("train.bin", "val.bin"):
            assert (tmp_path / f"out-{name}" / split).read_bytes() == (tmp_path / "whole" / split).read_bytes()


def test_a_long_document_that_is_not_utf8(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_file, "PIECE", 500)
    (tmp_path / "a.txt").write_bytes(b"word and word\n" * 100 + b"\xff")
    assert [type(d) for d in documents(tmp_path / "a.txt", "text")] == [Bad]


# ---- workers and interruptions


@pytest.fixture
def many(tmp_path):
    """Files of several kinds, with empty documents at the end."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(rows(400)))
    (folder / "b.jsonl.zst").write_bytes(zst(jsonl(rows(400, 400))))
    parquet(folder / "c.parquet", rows(400, 800))
    (folder / "d.txt").write_text(long_text(1, 5000))
    (folder / "e.jsonl").write_bytes(jsonl(["", ""]))
    return folder


def test_any_number_of_workers_writes_the_same(many, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "PIECE", 2000)                       # many batches
    files = find_files([many])
    for workers in (1, 2, 3):
        prepare(files, BYTE, tmp_path / f"out{workers}", 200, workers=workers)
    same_folders(tmp_path / "out1", tmp_path / "out2")
    same_folders(tmp_path / "out1", tmp_path / "out3")
    meta = read_meta(tmp_path / "out1")
    assert meta["empty_documents"] == 2 and sum(s["documents"] for s in meta["splits"].values()) == 1201
    assert texts_of(tmp_path / "out1") == sorted([*rows(1200), long_text(1, 5000)])


@pytest.mark.parametrize("fatal", [5, 17, 25])
def test_goes_on_after_an_interruption(many, tmp_path, fatal, monkeypatch, capsys):
    """Stopped after so many batches, whatever of it was noted; then again; then to the end: as without."""
    files = find_files([many])
    monkeypatch.setattr(prepare_data, "PIECE", 1000)
    prepare(files, BYTE, tmp_path / "whole", 200)
    encode, calls = prepare_data.encode, []

    def failing(pieces, tokenizer):
        calls.append(1)
        if len(calls) in (fatal, fatal + 9):
            raise KeyboardInterrupt
        return encode(pieces, tokenizer)

    monkeypatch.setattr(prepare_data, "encode", failing)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(files, BYTE, tmp_path / "out", 200)
        assert not (tmp_path / "out").exists()
    capsys.readouterr()
    prepare(files, BYTE, tmp_path / "out", 200)
    assert "going on with" in capsys.readouterr().out and not (tmp_path / "out.partial").exists()
    same_folders(tmp_path / "whole", tmp_path / "out")
    total = len(calls)
    calls[:] = [0] * 1000
    prepare(files, BYTE, tmp_path / "again", 200)
    assert total - 2 == len(calls) - 1000                                  # no batch was encoded twice


def test_what_is_left_of_other_inputs_is_not_used(many, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "PIECE", 1000)
    files, encode, calls = find_files([many]), prepare_data.encode, []

    def failing(pieces, tokenizer):
        calls.append(1)
        if len(calls) == 20:
            raise OSError(28, "No space left on device")
        return encode(pieces, tokenizer)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "encode", failing)
        with pytest.raises(OSError):
            prepare(files, BYTE, tmp_path / "out", 200)
    assert (tmp_path / "out.partial/progress.json").exists()
    os.truncate(tmp_path / "out.partial/train.bin", 10)                    # less than it says: damaged
    prepare(files[:3], BYTE, tmp_path / "out", 200)
    prepare(files[:3], BYTE, tmp_path / "fresh", 200)
    same_folders(tmp_path / "out", tmp_path / "fresh")


def test_killed_at_random_moments(tmp_path):
    """kill -9 with two workers, again and again, until it gets through."""
    (tmp_path / "in").mkdir()
    for i in range(4):
        (tmp_path / f"in/{i}.jsonl").write_bytes(jsonl(rows(60_000, 60_000 * i)))
    arguments = ["--input", tmp_path / "in", "--val-permille", 100]
    tokenizer = ["--tokenizer", save_bpe(tmp_path / "tokenizer.json")]
    assert command(*arguments, *tokenizer, "--out", tmp_path / "whole", "--workers", 1).returncode == 0
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import prepare_data; prepare_data.SAVE_EVERY = 0.05; "
            "prepare_data.PIECE = 100_000; prepare_data.main(sys.argv[1:]) if __name__ == '__main__' else None")
    script, rng, progress = tmp_path / "run.py", random.Random(0), tmp_path / "out.partial/progress.json"
    script.write_text(code)
    total = sum(counts["tokens"] for counts in read_meta(tmp_path / "whole")["splits"].values())

    def start():
        return subprocess.Popen([sys.executable, str(script), *map(str, [*arguments, *tokenizer, "--workers", 2, "--out", tmp_path / "out"])],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def written():
        try:
            return sum(counts["tokens"] for counts in json.loads(progress.read_text())["splits"].values())
        except FileNotFoundError:
            return 0

    for share in (0.05, 0.15, 0.3):                                        # of the work, and a moment more
        process = start()
        while written() < share * total:
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and share * total <= written() < total and not (tmp_path / "out").exists()
    assert start().wait() == 0
    for name in ("train.bin", "val.bin", "meta.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_dead_worker_ends_the_run(many, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "PIECE", 1000)
    start, made = prepare_data.pool, []
    monkeypatch.setattr(prepare_data, "pool", lambda *args: made.append(start(*args)) or made[-1])
    encode = documents_file.checked

    def killing(*args):
        if made and made[0]._processes and args[1].endswith("row 100"):
            os.kill(next(iter(made[0]._processes)), signal.SIGKILL)
        return encode(*args)

    monkeypatch.setattr(documents_file, "checked", killing)
    with pytest.raises(DataError, match="a worker process died .*the same command goes on"):
        prepare(find_files([many]), BYTE, tmp_path / "out", 200, workers=2)
    monkeypatch.setattr(documents_file, "checked", encode)
    prepare(find_files([many]), BYTE, tmp_path / "out", 200, workers=2)
    prepare(find_files([many]), BYTE, tmp_path / "whole", 200)
    same_folders(tmp_path / "whole", tmp_path / "out")


# ---- limits and mixtures


@pytest.mark.parametrize("workers", [1, 2])
def test_limit_tokens_ends_with_a_document(many, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(prepare_data, "PIECE", 1000)
    meta = prepare(find_files([many]), BYTE, tmp_path / f"out{workers}", 200, workers=workers, limit_tokens=5000)
    lengths = np.cumsum([len(t) + 1 for t in rows(1200)])
    n = int(np.flatnonzero(lengths >= 5000)[0]) + 1
    assert sum(s["tokens"] for s in meta["splits"].values()) == lengths[n - 1]
    assert texts_of(tmp_path / f"out{workers}") == sorted(rows(n))


def test_sources_are_mixed_by_weight(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare_data, "PIECE", 1000)
    for name, start, n in (("web", 0, 3000), ("code", 10_000, 2000), ("books", 20_000, 100)):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(rows(n, start)))
    arguments = ["--source", f"web={tmp_path / 'web.jsonl'}:0.6", "--source", f"code={tmp_path / 'code.jsonl'}:0.3",
                 "--source", f"books={tmp_path / 'books.jsonl'}:0.1", "--val-permille", "100"]
    for workers in ("1", "2"):
        main([*arguments, "--workers", workers, "--out", str(tmp_path / f"out{workers}")])
    same_folders(tmp_path / "out1", tmp_path / "out2")
    texts, sources = texts_of(tmp_path / "out1"), read_meta(tmp_path / "out1")["sources"]
    taken = {name: sum(len(t) for t in texts if start <= int(t.split()[1]) < start + 10_000)
             for name, start in (("web", 0), ("code", 10_000), ("books", 20_000))}
    assert [(s["name"], s["weight"], s["text_bytes"]) for s in sources] == [
        ("web", 0.6, taken["web"]), ("code", 0.3, taken["code"]), ("books", 0.1, taken["books"])]
    total = sum(taken.values())
    assert all(abs(taken[s["name"]] / total - s["weight"]) < 0.01 for s in sources)
    assert taken["books"] == sum(map(len, rows(100, 20_000)))              # the first to be exhausted, and all of it
    assert "web: " in capsys.readouterr().out
    order = [int(t.split()[1]) // 10_000 for t in texts_of(tmp_path / "out1", "train")]
    assert set(order[:30]) == {0, 1, 2}                                    # mixed throughout, not one after another


def test_a_mixture_goes_on_inside_of_a_long_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_file, "PIECE", 300)
    monkeypatch.setattr(prepare_data, "PIECE", 300)
    (tmp_path / "long.jsonl").write_bytes(jsonl([long_text(i, 3000) for i in range(6)]))
    (tmp_path / "short.jsonl").write_bytes(jsonl(rows(600)))
    sources = [Source("long", [tmp_path / "long.jsonl"], 0.5), Source("short", [tmp_path / "short.jsonl"], 0.5)]
    prepare(sources, BYTE, tmp_path / "whole", 300)
    encode, calls = prepare_data.encode, []

    def failing(pieces, tokenizer):
        calls.append(1)
        if len(calls) % 7 == 0:
            raise KeyboardInterrupt
        return encode(pieces, tokenizer)

    monkeypatch.setattr(prepare_data, "encode", failing)
    while not (tmp_path / "out").exists():
        try:
            prepare(sources, BYTE, tmp_path / "out", 300)
        except KeyboardInterrupt:
            pass
    assert len(calls) > 50
    same_folders(tmp_path / "whole", tmp_path / "out")


def test_a_limit_that_was_reached_stays_reached(many, tmp_path, monkeypatch):
    """Killed between the last token and the folder's name."""
    monkeypatch.setattr(prepare_data, "PIECE", 1000)
    hash_of = prepare_data.file_hash

    def failing(path):
        if path.suffix == ".bin":
            raise KeyboardInterrupt
        return hash_of(path)

    monkeypatch.setattr(prepare_data, "file_hash", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(find_files([many]), BYTE, tmp_path / "out", 200, limit_tokens=3000)
    monkeypatch.setattr(prepare_data, "file_hash", hash_of)
    prepare(find_files([many]), BYTE, tmp_path / "out", 200, limit_tokens=3000)
    prepare(find_files([many]), BYTE, tmp_path / "whole", 200, limit_tokens=3000)
    same_folders(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("wrong", ["web", "web=", "web=a.txt", "web=a.txt:0", "web=a.txt:x", "=a.txt:1", "web=a.txt:-1", "web=a.txt:inf"])
def test_sources_that_cannot_be_read(wrong):
    with pytest.raises(DataError, match="write NAME=PATH.*:WEIGHT"):
        main(["--source", wrong, "--out", "x"])


# ---- looking at a folder


def test_inspect_and_verify(many, tmp_path, capsys):
    prepare(find_files([many]), BYTE, tmp_path / "out", 200)
    capsys.readouterr()
    main(["inspect", str(tmp_path / "out")])
    said = capsys.readouterr().out
    lengths = [len(t) for t in texts_of(tmp_path / "out", "train")]
    count = sum(16 <= n < 32 for n in lengths)
    assert f"16 - 31         {count:>12,} " in said and "end of text: 256" in said and repr(texts_of(tmp_path / "out", "train")[1]) in said
    main(["verify", str(tmp_path / "out")])
    assert capsys.readouterr().out.count("as written") == 2
    data = TokenBin(tmp_path / "out", "val")
    for position, value, words in ((5, 65, "other contents"), (6, 300, "its largest id is 300; meta.json says 256, of 257")):
        kept = np.memmap(data.path, dtype="uint16", mode="r+")
        before, kept[position] = kept[position].item(), value
        kept.flush()
        with pytest.raises(DataError, match=words):
            main(["verify", str(tmp_path / "out")])
        kept[position] = before
        kept.flush()
    main(["verify", str(tmp_path / "out")])
    for name in ("inspect", "verify"):
        with pytest.raises(DataError, match=f"prepare_data.py {name} data/NAME"):
            main([name])


def test_one_source_object_is_enough(many, tmp_path):
    prepare([Source("all", find_files([many]))], BYTE, tmp_path / "a", 200)
    assert read_meta(tmp_path / "a")["sources"][0]["name"] == "all"
