"""Configuration, schedules, data order, exact resume, checkpoints, and what stops a run. One process; see test_ddp.py."""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints
import train
from bench import saved_bytes
from checkpoints import load_checkpoint, read
from helpers import write_corpus
from model import GPT, PATHWAYS, ConfigError, ModelConfig
from errors import DataError
from train import RunError, TrainConfig, learning_rate, load_config, shuffled, windows_of_step

ROOT = Path(__file__).parents[1]
TINY = {"vocab_size": 257, "seq_len": 16, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "d_model": 16, "d_ff": 24,
        "residual": "mhar", "max_steps": 6, "batch_tokens": 128, "micro_batch_size": 4, "learning_rate": 3e-3,
        "warmup_steps": 2, "eval_interval": 100, "eval_tokens": 512, "save_interval": 100, "log_interval": 1, "device": "cpu"}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture
def config_file(tmp_path, corpus):
    path = tmp_path / "tiny.py"
    path.write_text("\n".join(f"{k} = {v!r}" for k, v in (TINY | {"data_dir": str(corpus)}).items()), encoding="utf-8")
    return path


@pytest.fixture
def run(config_file, tmp_path):
    """run("name", key=value, ...) trains into tmp_path/name and returns that folder."""
    def go(name, **changes):
        train.main([str(config_file), f"--out_dir={tmp_path / name}", *(f"--{k}={v}" for k, v in changes.items())])
        return tmp_path / name
    return go


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return {r["step"]: r["loss"] for r in log_of(folder)}


def assert_equal_states(a, b):
    """Weights, moments and step counts of two checkpoints, bit for bit."""
    a, b = load_checkpoint(a, moments=True), load_checkpoint(b, moments=True)
    for part in ("model", "ema", "exp_avg", "exp_avg_sq"):
        assert a.get(part, {}).keys() == b.get(part, {}).keys()
        for name, value in a.get(part, {}).items():
            assert torch.equal(value, b[part][name]) and value.dtype == b[part][name].dtype, name
    assert a["exp_avg"]
    assert (a["step"], a["best_val_loss"]) == (b["step"], b["best_val_loss"])


# ---- configuration


@pytest.mark.parametrize("argument, value", [
    ("learning_rate=1", 1.0), ("max_steps=1e5", 100_000), ("dropout=0", 0.0), ("compile=False", False), ("compile=true", True),
    ("compile=None", None), ("eval_tokens=None", None), ("eval_tokens=4096", 4096), ("out_dir='a b=c'", "a b=c"), ("out_dir=7", "7"),
    ("learning_rate=1e-3", 1e-3), ("resume=never", "never"), ('schedule="wsd"', "wsd"), ("head_dim=8", 8)])
def test_values_are_understood(config_file, argument, value):
    config, model_config = load_config([str(config_file), "--" + argument])
    name = argument.partition("=")[0]
    found = getattr(config if hasattr(config, name) else model_config, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("argument, message", [
    ("learning_rte=1", "unknown key 'learning_rte' (did you mean learning_rate?)"),
    ("max_steps=1.5", "max_steps=1.5: expected int, not float"),
    ("max_steps=ten", "max_steps='ten': expected int, not str"),
    ("max_steps=True", "max_steps=True: expected int, not bool"),
    ("compile=maybe", "compile='maybe': expected bool or None, not str"),
    ("compile=0", "compile=0: expected bool or None, not int"),
    ("learning_rate=-1", "learning_rate must be positive, not -1.0"),
    ("schedule=cosin", "unknown schedule='cosin' (did you mean cosine?); known: cosine"),
    ("residual=mahr", "unknown residual='mahr' (did you mean mhar?); known: add"),
    ("checkpoint=all", "unknown checkpoint='all'; known: none, sublayer"),
    ("kernels=fast", "unknown kernels='fast'; known: auto, reference, lean, triton"),
    ("device=tpu", "unknown device='tpu'"),
    ("keep_last=0", "keep_last must be at least 1, not 0"),
    ("ema_decay=1", "ema_decay must be in [0, 1), not 1.0"),
    ("n_head=3", "n_head must divide d_model, but d_model=16 and n_head=3"),
    ("max_steps", "write --max_steps=VALUE"),
    ("batch_tokens=100", "batch_tokens=100 is no multiple of micro_batch_size * seq_len * processes = 4 * 16 * 1 = 64; "
                         "the nearest is 128"),
    ("eval_tokens=10", "eval_tokens=10, but"),
    ("vocab_size=100", "--vocab_size=257 or more"),
    ("seq_len=32000 --batch_tokens=128000", "too few for one window of seq_len=32000"),
    ("data_dir=nowhere", "no data in nowhere: make it with"),
    ("resume=nowhere.pt", "no checkpoint at nowhere.pt"),
])
def test_bad_values_are_named(run, config_file, tmp_path, argument, message):
    with pytest.raises((ConfigError, DataError), match=re.escape(message)) as e:
        train.main([str(config_file), f"--out_dir={tmp_path / 'out'}", *f"--{argument}".split()])
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out/log.jsonl").exists()                      # refused before the first step


def test_bad_config_files(tmp_path):
    typo = tmp_path / "typo.py"
    typo.write_text("n_layers = 3\n")
    with pytest.raises(ConfigError, match=r"unknown key 'n_layers' in .*typo.py \(did you mean n_layer\?\)"):
        load_config([str(typo)])
    typo.write_text("n_layer = = 3\n")
    with pytest.raises(ConfigError, match="typo.py cannot be run: SyntaxError"):
        load_config([str(typo)])
    with pytest.raises(ConfigError, match=r"no config file mahr_1b.py \(did you mean mhar_1b\?\); known: attnres_100m"):
        load_config(["mahr_1b.py"])
    with pytest.raises(ConfigError, match="give a config file: python train.py"):
        load_config(["--max_steps=3"])


def test_config_files_import_each_other_and_the_command_line_wins(tmp_path):
    (tmp_path / "base.py").write_text("import math\n_twice = 2\nn_layer = _twice * 2\nmax_steps = 7\n")
    (tmp_path / "child.py").write_text("from base import *\nmax_steps = 8\n")
    config, model_config = load_config([str(tmp_path / "child.py"), "--max_steps=9"])
    assert (config.max_steps, model_config.n_layer, config.out_dir) == (9, 4, "out/child")


@pytest.mark.parametrize("name", ["config/mhar_1b.py", "configs/mhar_1b.py", "mhar_1b.py", "mhar_1b"])
def test_configs_are_found(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert train.find_config(name) == ROOT / "configs" / "mhar_1b.py"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_config_runs_dry(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main([str(path), "--dry_run"])
    printed = capsys.readouterr().out
    text = path.read_text()
    published = re.search(r"([\d,]{7,}) parameters\.", text)
    if published:
        assert f" {published[1]} parameters" in printed
    if "tokens a step" in text:
        assert re.search(r"# ([\d,]+) tokens a step", text)[1] + " tokens a step" in printed
    assert "memory of a process" in printed and not list(tmp_path.iterdir())


def test_every_key_is_read_somewhere():
    code = "".join((ROOT / name).read_text() for name in ("train.py", "model.py", "body.py"))
    for name in train.TYPES:
        assert re.search(rf"\b(c|config|model_config|self|pathway)\.{name}\b", code), name


# ---- schedules and data order


@pytest.mark.parametrize("schedule", train.SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10, 100])
def test_schedule(schedule, warmup):
    c = TrainConfig(max_steps=100, warmup_steps=warmup, schedule=schedule, learning_rate=2.0, min_lr_ratio=0.1)
    lr = [learning_rate(step, c) for step in range(1, 102)]
    assert all(0 < x <= 2.0 for x in lr)
    assert lr[:warmup] == [2.0 * step / warmup for step in range(1, warmup + 1)]          # never 0, the peak at warmup_steps
    assert all(a >= b for a, b in zip(lr[max(warmup - 1, 0):], lr[max(warmup, 1):]))
    if warmup < 100:
        assert lr[99] == pytest.approx(2.0 if schedule == "constant" else 0.2)
        assert lr[100] == lr[99]


def test_schedule_shapes():
    at = lambda schedule, step: learning_rate(step, TrainConfig(max_steps=100, warmup_steps=0, schedule=schedule,
                                                                learning_rate=1.0, min_lr_ratio=0.0))
    assert at("cosine", 25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert at("linear", 25) == pytest.approx(0.75)
    assert at("1-sqrt", 25) == pytest.approx(0.5)
    assert [at("wsd", step) for step in (50, 80, 90)] == pytest.approx([1.0, 1.0, 0.5])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 65_537])
def test_shuffle_is_a_permutation(n):
    order = shuffled(np.arange(n), n, 7)
    assert sorted(order) == list(range(n))
    if n > 100:
        assert (order != shuffled(np.arange(n), n, 8)).mean() > 0.9
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.1


def test_shuffle_needs_no_memory():
    n = 10 ** 15
    found = shuffled(np.arange(1000), n, 3)
    assert len(set(found)) == 1000 and 0 <= found.min() and found.max() < n


def test_every_window_once_an_epoch():
    n, size = 10, 4                                                       # the batch does not divide the epoch
    seen = np.concatenate([windows_of_step(step, n, size, seed=1) for step in range(1, 16)])
    epochs = seen.reshape(6, n)
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert sorted(windows_of_step(1, 1, 3, seed=1)) == [0, 0, 0]            # one window, three epochs a step


def test_processes_share_the_windows_of_a_step():
    """100 tokens in windows of 8, four processes of two sequences: 12 windows an epoch, none lost, none read twice."""
    n, world, micro = (100 - 1) // 8, 4, 2
    steps = [windows_of_step(step, n, world * micro, seed=0) for step in range(1, 4)]          # 24 windows = 2 epochs
    parts = [[steps[i][rank * micro:][:micro] for i in range(3)] for rank in range(world)]
    read = np.concatenate([window for i in range(3) for rank in range(world) for window in (parts[rank][i],)])
    assert sorted(read[:n]) == sorted(read[n:]) == list(range(n))


def test_seeds(run):
    same = [losses(run(name, seed=s, init_seed=i, max_steps=3)) for name, s, i in
            (("a", 1, 1), ("b", 1, 1), ("c", 2, 1), ("d", 1, 2))]
    assert same[0] == same[1] != same[2] and same[0] != same[3]


# ---- exact resume

DETAILS = {"max_steps": 8, "dropout": 0.2, "ema_decay": 0.9, "eval_interval": 3, "save_interval": 100, "schedule": "wsd"}


@pytest.fixture
def undisturbed(run):
    return run("straight", **DETAILS)


def send_at(monkeypatch, calls, number=signal.SIGTERM):
    """Send this process a signal while it fetches training batches number `calls`, counted from 1."""
    fetch, count = train.batch, 0

    def batch(data, *args):
        nonlocal count
        count += data.path.stem == "train"
        if data.path.stem == "train" and count in calls:
            os.kill(os.getpid(), number)
        return fetch(data, *args)

    monkeypatch.setattr(train, "batch", batch)


@pytest.mark.parametrize("calls", [(1,), (4, 9), (5, 7)], ids=str)        # two passes a step: 4 is inside accumulation
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_signal_and_resumed_twice(run, undisturbed, monkeypatch, calls, number, capsys):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    send_at(monkeypatch, calls, number)
    for _ in range(3):
        folder = run("resumed", **DETAILS)
    assert capsys.readouterr().out.count("stopped by signal after step") == len(calls)
    assert_equal_states(undisturbed / "ckpt/latest.pt", folder / "ckpt/latest.pt")
    strip = lambda r: {k: v for k, v in r.items() if k not in ("tokens_per_s", "memory_gb")}
    assert [strip(r) for r in log_of(folder)] == [strip(r) for r in log_of(undisturbed)]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_killed_and_resumed(run, undisturbed, monkeypatch):
    """A crash loses what came after the last checkpoint; its log lines are dropped and made again."""
    monkeypatch.setattr(train, "windows_of_step", lambda step, *a: (_ for _ in ()).throw(KeyboardInterrupt) if step == 6
                        else windows_of_step(step, *a))
    with pytest.raises(KeyboardInterrupt):
        run("killed", **DETAILS | {"save_interval": 4})
    with open(undisturbed.with_name("killed") / "log.jsonl", "a") as f:
        f.write('{"step": 6, "loss"')                                     # cut short
    monkeypatch.undo()
    folder = run("killed", **DETAILS)
    assert_equal_states(undisturbed / "ckpt/latest.pt", folder / "ckpt/latest.pt")
    assert losses(folder) == losses(undisturbed) and [r["step"] for r in log_of(folder)] == list(range(1, 9))


def test_resume_across_an_epoch_border(run):
    steps = {"seq_len": 128, "batch_tokens": 128 * 128, "micro_batch_size": 128, "schedule": "constant"}
    straight = run("straight", **steps, max_steps=4)
    assert log_of(straight)[2]["epoch"] > 1
    for k in (1, 3, 4):
        folder = run("parts", **steps, max_steps=k)
    assert_equal_states(straight / "ckpt/latest.pt", folder / "ckpt/latest.pt")


def test_evaluation_and_logging_change_nothing(run):
    base = losses(run("a", dropout=0.1))
    assert base == losses(run("b", dropout=0.1, eval_interval=1, save_interval=2))
    sparse = losses(run("c", dropout=0.1, log_interval=3))
    assert sparse == {step: base[step] for step in (3, 6)}
    assert base == losses(run("d", dropout=0.1, checkpoint="sublayer"))


def test_accumulation_equals_one_large_batch(run):
    a, b = losses(run("a")), losses(run("b", micro_batch_size=8))
    assert a.keys() == b.keys() and all(abs(a[k] - b[k]) < 1e-6 for k in a) and a[1] != a[6]


def test_validation_is_the_same_every_time(run):
    folder = run("a")
    again = run("b", resume=folder / "ckpt/latest.pt", max_steps=0)
    assert log_of(again)[-1]["val_loss"] == log_of(folder)[-1]["val_loss"]


@pytest.mark.parametrize("steps", [1, 3])
def test_exactly_as_many_steps_as_asked(run, steps):
    folder = run("a", max_steps=steps)
    state = load_checkpoint(folder)
    assert state["step"] == steps == len(log_of(folder))


def test_zero_steps_evaluate_only(run):
    folder = run("a", max_steps=0)
    (record,) = log_of(folder)
    assert record["step"] == 0 and record["val_loss"] == pytest.approx(math.log(257), abs=0.1)
    assert not list((folder / "ckpt").iterdir())


def test_log_and_summary_files(run):
    folder = run("a", eval_interval=3)
    log = log_of(folder)
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s"} <= log[0].keys() and "val_loss" not in log[0]
    assert [r["step"] for r in log if "val_loss" in r] == [3, 6] and 0.9 < log[-1]["routing_entropy"] <= 1
    config = json.loads((folder / "config.json").read_text())
    assert config["route_heads"] == 1 and config["max_steps"] == 6
    facts = json.loads((folder / "run.json").read_text())
    assert facts["routing_parameters"] == 5 * 16 * 2 and facts["kernels"] == "lean"


@pytest.mark.parametrize("residual", PATHWAYS)
def test_every_pathway_learns_and_every_routing_parameter_moves(run, residual):
    folder = run("a", residual=residual, max_steps=20, learning_rate=1e-2)
    found = losses(folder)
    assert found[20] < found[1] - 0.5
    if residual != "add":
        first = load_checkpoint(run("b", residual=residual, max_steps=1, learning_rate=1e-9))["model"]
        last = load_checkpoint(folder)["model"]
        for name in (n for n in last if n.startswith("pathway.")):
            assert not torch.equal(first[name], last[name]), name


def test_bfloat16_weights(run):
    folder = run("a", param_dtype="bfloat16", dtype="bfloat16", max_steps=20, learning_rate=1e-2, save_interval=10)
    state = load_checkpoint(folder)
    assert {w.dtype for w in state["model"].values()} == {torch.bfloat16}
    assert {m.dtype for m in state["exp_avg"].values()} == {torch.bfloat16}
    assert state["model"]["pathway.query"].abs().max() > 0 and losses(folder)[20] < losses(folder)[1] - 0.5
    assert_equal_states(folder / "ckpt/latest.pt", run("b", param_dtype="bfloat16", dtype="bfloat16", max_steps=20,
                                                       learning_rate=1e-2, resume=folder / "ckpt/step_00000010.pt") / "ckpt/latest.pt")


# ---- checkpoints


@pytest.mark.parametrize("keep", [1, 2])
def test_keep_last(run, keep):
    folder = run("a", save_interval=1, keep_last=keep, eval_interval=2) / "ckpt"
    assert sorted(p.name for p in folder.iterdir()) == ["best.pt", "latest.pt"] + [f"step_{s:08d}.pt" for s in range(7 - keep, 7)]
    assert (folder / "latest.pt").samefile(folder / "step_00000006.pt")


def test_best_is_kept_when_later_ones_are_worse(run):
    folder = run("a", max_steps=4, eval_interval=2)
    best = (folder / "ckpt/best.pt").read_bytes()
    value = load_checkpoint(folder / "ckpt/best.pt")["best_val_loss"]
    run("a", max_steps=8, eval_interval=2, learning_rate=3.0, schedule="constant")      # climbs
    assert (folder / "ckpt/best.pt").read_bytes() == best and load_checkpoint(folder)["step"] == 8
    assert load_checkpoint(folder)["best_val_loss"] == value < log_of(folder)[-1]["val_loss"]


def in_subprocess(code, *arguments, **kw):
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                          timeout=120, **kw)


def test_killed_while_saving(run, config_file, tmp_path):
    folder = run("a")
    before = (folder / "ckpt/latest.pt").read_bytes()
    done = in_subprocess("import os, signal, sys, torch, train\n"
                         "torch.save = lambda state, f: (f.write(b'half'), f.flush(), os.kill(os.getpid(), signal.SIGKILL))\n"
                         "train.main(sys.argv[1:])", config_file, f"--out_dir={folder}", "--max_steps=7")
    assert done.returncode == -signal.SIGKILL
    assert (folder / "ckpt/latest.pt").read_bytes() == before and list((folder / "ckpt").glob("*.tmp"))
    run("a", max_steps=7)
    assert load_checkpoint(folder)["step"] == 7 and not list((folder / "ckpt").glob("*.tmp"))


def test_full_disk(run, config_file):
    folder = run("a")
    before = (folder / "ckpt/latest.pt").read_bytes()
    limit = len(before) // 2                                              # files may not grow beyond this
    done = subprocess.run([sys.executable, "train.py", config_file, f"--out_dir={folder}", "--max_steps=7"], cwd=ROOT,
                          capture_output=True, text=True, timeout=120,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert done.returncode == 1 and re.search(r"train.py: cannot write .*step_00000007.pt: .*; the checkpoints before it are "
                                              "untouched$", done.stderr.strip()), done.stderr
    assert (folder / "ckpt/latest.pt").read_bytes() == before and not list((folder / "ckpt").glob("*.tmp"))


def test_a_passing_write_error_is_tried_again(run, monkeypatch):
    save, failures = torch.save, [OSError("busy")]
    monkeypatch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(failures.pop()) if failures else save(*a))
    monkeypatch.setattr(checkpoints.time, "sleep", lambda s: None)
    assert load_checkpoint(run("a"))["step"] == 6 and not failures


def test_a_folder_that_cannot_be_made(config_file, tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run([sys.executable, "train.py", config_file, f"--out_dir={tmp_path / 'file' / 'out'}"], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("train.py: ") and "file/out" in done.stderr
    assert done.stderr.count("\n") == 1


# ---- refusals on resume


def test_a_resumed_run_lets_go_of_the_checkpoint(run, monkeypatch):
    """Or it would need twice the memory of a fresh one, for as long as it lasts."""
    run("a")
    loaded, alive = [], []

    class State(dict):
        pass

    def load(path):
        state = State(read(path))
        loaded.append(weakref.ref(state))
        return state

    fetch = train.batch
    monkeypatch.setattr(train, "read", load)
    monkeypatch.setattr(train, "batch", lambda *args: (alive.append(loaded[0]() is not None), fetch(*args))[1])
    run("a", max_steps=7)
    assert alive and not any(alive)


def test_another_architecture_is_refused_by_name(run):
    folder = run("a")
    before = (folder / "ckpt/latest.pt").read_bytes()
    for change in ({"residual": "attnres"}, {"n_layer": 3}, {"rope_theta": 5e5}, {"sites_per_block": 2}, {"seq_len": 32}):
        (name,) = change
        with pytest.raises(ConfigError, match=f"another architecture: {name} "):
            run("a", **change)
    assert (folder / "ckpt/latest.pt").read_bytes() == before


def test_other_changes_are_printed(run, capsys):
    run("a")
    run("a", max_steps=7, learning_rate=1e-3)
    printed = capsys.readouterr().out
    assert "changed max_steps: 6 -> 7" in printed and "changed learning_rate: 0.003 -> 0.001" in printed
    run("a", max_steps=7, learning_rate=1e-3)
    assert "is at step 7 of 7 already: nothing to do" in capsys.readouterr().out


def test_a_run_is_never_overwritten(run):
    other, folder = run("b"), run("a")
    for resume in ("never", other / "ckpt/latest.pt"):
        with pytest.raises(ConfigError, match="holds a run already"):
            run("a", resume=resume)
    assert losses(run("c", resume=other, max_steps=7)).keys() == {7} and losses(folder).keys() == set(range(1, 7))


def test_weights_only_cannot_be_resumed(run, tmp_path):
    state = load_checkpoint(run("a"))
    del state["exp_avg"]
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="weights.pt holds weights only"):
        run("b", resume=tmp_path / "weights.pt")


# ---- what ends a run


def test_nan_stops_and_keeps_the_last_good_checkpoint(run, monkeypatch):
    folder = run("a", max_steps=3)
    before = (folder / "ckpt/latest.pt").read_bytes()
    clip = torch.nn.utils.clip_grad_norm_

    def poison(parameters, norm):
        parameters = list(parameters)
        parameters[0].data.fill_(math.inf)
        return clip(parameters, norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poison)
    with pytest.raises(RunError, match=r"step 5: loss nan.*the last good checkpoint is .*latest.pt"):
        run("a", max_steps=6)
    assert (folder / "ckpt/latest.pt").read_bytes() == before


def test_no_gpu(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no GPU: use --device=cpu"):
        run("a", device="cuda")


def test_dtype_is_a_function_of_the_device():
    choose = train.choose_dtype
    assert choose("auto", "cuda", True) == torch.bfloat16 and choose("auto", "cuda", False) == torch.float32
    assert choose("auto", "cpu", True) == choose("auto", "mps", True) == torch.float32
    assert choose("bfloat16", "cpu", True) == torch.bfloat16
    with pytest.raises(ConfigError, match="no bfloat16 arithmetic: use --dtype=float32"):
        choose("bfloat16", "cuda", False)


def test_peak_flops():
    assert train.peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert train.peak_flops("NVIDIA H100 PCIe", torch.bfloat16) is None
    assert train.peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None
    assert train.peak_flops("cpu", torch.bfloat16) is None


def test_wandb_is_optional(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'wandb': pip install -e .\[wandb\]"):
        run("a", wandb=True)


def test_without_triton_and_with_a_port_in_use(config_file, tmp_path):
    import socket
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(taken.getsockname()[1])}
        done = in_subprocess("import runpy, sys; sys.modules['triton'] = None; runpy.run_path('train.py', run_name='__main__')",
                             config_file, f"--out_dir={tmp_path / 'out'}", env=env)
    assert done.returncode == 1 and re.search(r"train.py: the processes cannot meet at 127.0.0.1:\d+ .*--master_port=N", done.stderr)


@pytest.mark.parametrize("config", [*(dict(residual=r) for r in ("add", "mhar", "dar", "delta", "hc_static", "hc", "mhc")),
                                    dict(residual="add", moe_n_expert=8, moe_d_ff=128, moe_n_shared=1)], ids=str)
def test_memory_estimate_is_near_what_is_kept(config):
    config = ModelConfig(vocab_size=64, seq_len=64, n_layer=6, n_head=4, n_kv_head=2, d_model=128, d_ff=256, **config)
    estimate = train.memory_estimate(TrainConfig(micro_batch_size=2, dtype="float32"), GPT(config))["activations (estimate)"]
    assert estimate == pytest.approx(saved_bytes(GPT(config), torch.zeros(2, 64, dtype=torch.long)), rel=0.35)
