"""Two processes under torchrun (gloo) against one."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from checkpoints import load_checkpoint
from test_train import ROOT, assert_equal_states, config_file, corpus, log_of, losses, run  # noqa: F401 (fixtures)

DETAILS = {"max_steps": 6, "dropout": 0.1, "eval_interval": 3, "eval_tokens": 592, "batch_tokens": 256, "ema_decay": 0.5}


def torchrun(script, *arguments, wait=True, n=2):
    """Run `script` in n processes (0 = one, without torchrun) -> (exit status, output)."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"] if n else []
    command = [sys.executable, *launcher, script, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not wait:
        return process
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@pytest.fixture
def pair(config_file, tmp_path):
    """pair("name", key=value, ...) trains with two processes into tmp_path/name."""
    def go(name, wait=True, script="train.py", **changes):
        return torchrun(script, config_file, f"--out_dir={tmp_path / name}", *(f"--{k}={v}" for k, v in changes.items()), wait=wait)
    return go


def test_two_processes_equal_one(pair, run, tmp_path):
    one = run("one", **DETAILS)                                           # 4 passes of one process, 2 of each of two
    code, output = pair("two", **DETAILS)
    assert code == 0, output
    a, b = log_of(one), log_of(tmp_path / "two")
    assert [r["step"] for r in a] == [r["step"] for r in b] and a[0]["loss"] != a[5]["loss"]
    for x, y in zip(a, b):
        for key in ("loss", "grad_norm", "val_loss", "val_loss_ema"):
            assert (key in x) == (key in y) and (key not in x or abs(x[key] - y[key]) < 1e-6), (x["step"], key)
    assert json.loads((tmp_path / "two/run.json").read_text())["processes"] == 2
    # one process evaluates the weights that two made to the very same number, and goes on from them
    alone = run("alone", **DETAILS | {"max_steps": 0}, resume=tmp_path / "two")
    assert log_of(alone)[-1]["val_loss"] == b[-1]["val_loss"]
    ahead, behind = run("one", **DETAILS | {"max_steps": 8}), run("two", **DETAILS | {"max_steps": 8})
    assert all(abs(losses(ahead)[step] - losses(behind)[step]) < 1e-6 for step in (7, 8))


def test_kernels_with_two_processes(pair, run, tmp_path, monkeypatch):
    """kernels=triton, interpreted, under DDP with accumulation, against lean with one process."""
    details = dict(max_steps=2, batch_tokens=64, micro_batch_size=1, eval_tokens=32, residual="mhar", n_layer=1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, output = pair("two", kernels="triton", **details)
    assert code == 0 and "kernels: triton" in output, output
    a, b = losses(run("one", kernels="lean", **details)), losses(tmp_path / "two")
    assert a.keys() == b.keys() and all(abs(a[step] - b[step]) < 1e-5 for step in a)


def test_a_signal_stops_both_and_the_run_goes_on(pair, run, tmp_path):
    details = DETAILS | {"max_steps": 3000, "schedule": "constant", "save_interval": 10_000, "eval_interval": 10_000}
    process = pair("two", wait=False, **details)
    log = tmp_path / "two/log.jsonl"
    deadline = time.time() + 60
    while not (log.exists() and log.read_text().count("\n") > 5) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    stopped = int(output.partition("stopped by signal after step ")[2].partition("\n")[0].split()[0].rstrip(";"))
    assert stopped > 5 and load_checkpoint(tmp_path / "two")["step"] == stopped == log_of(tmp_path / "two")[-1]["step"]


def test_one_failing_process_ends_all(pair, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
                      "import train\n"
                      "fetch, calls = train.batch, []\n"
                      "def batch(*a):\n"
                      "    calls.append(1)\n"
                      "    if os.environ['RANK'] == '1' and len(calls) == 4:\n"
                      "        raise SystemExit('rank 1 fails')\n"
                      "    return fetch(*a)\n"
                      "train.batch = batch\n"
                      "train.main()\n")
    code, output = pair("two", script=str(script), **DETAILS)
    assert code != 0 and "rank 1 fails" in output and not list(Path(tmp_path / "two/ckpt").glob("*.pt"))


def test_a_batch_that_two_processes_cannot_share(pair):
    code, output = pair("two", batch_tokens=64)
    assert code != 0 and "micro_batch_size * seq_len * processes = 4 * 16 * 2 = 128; the nearest is 128" in output
