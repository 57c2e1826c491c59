"""README does what it says: its code runs as printed, its commands and files exist. And bench.py runs."""

import json
import re
import shlex

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import bench
import model
import train
from helpers import tiny_config
from route_kernels import RUNGS
from test_train import ROOT, config_file, corpus  # noqa: F401 (fixtures)

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (\S.*?)(?:\s+#.*)?$", README, flags=re.M)


def test_hack_it_runs_as_printed(corpus, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert "class DepthAverage" in code and len(code.splitlines()) < 40
    real = train.main
    monkeypatch.setattr(model, "PATHWAYS", dict(model.PATHWAYS))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train, "main", lambda argv: real(argv + [
        f"--data_dir={corpus}", f"--out_dir={tmp_path / 'out'}", "--max_steps=30", "--log_interval=1", "--eval_tokens=512",
        "--n_layer=2", "--d_model=32", "--seq_len=32", "--batch_tokens=256", "--warmup_steps=5", "--learning_rate=1e-2"]))
    exec(compile(code, "README.md", "exec"), {})
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert len(losses) == 30 and losses[-1] < losses[0] - 1
    logits = model.load_checkpoint(tmp_path / "out")["model"]["pathway.logit"]
    assert logits.shape == (5, 5) and logits[4].std() > 0                  # the readout has learned to choose


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c])
def test_training_commands_can_run(command, capsys, monkeypatch):
    arguments = shlex.split(command)
    arguments = arguments[arguments.index("train.py") + 1:]
    train.main(arguments + ["--dry_run"] * ("--dry_run" not in arguments))
    assert "memory of a process" in capsys.readouterr().out


def test_commands_and_links_name_what_exists():
    assert len(COMMANDS) > 12
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in targets, command
        for word in words:
            if word.endswith(".py") and word != "my_pathway.py":
                assert (ROOT / word).exists() or train.find_config(word), command
    for link in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / link).exists(), link


def test_published_numbers_are_those_of_the_configs(monkeypatch, capsys):
    """And sizes and memory are what dry_run prints."""
    monkeypatch.setenv("WORLD_SIZE", "8")

    def dry_run(name):
        train.main([name, "--dry_run"])
        printed = capsys.readouterr().out
        return re.search(r"of them ([\d,]+) routing", printed).group(1), float(re.search(r"([\d.]+) GiB$", printed.strip()).group(1))

    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([\d,/ ]*) \| ([\d./ ]+) \|$", README, flags=re.M)
    assert [name for name, *_ in rows] == ["baseline", "hc_static", "attnres", "mhar", "mhar_h16", "mhc", "attnres_block", "dar", "dar_block"]
    for method, published, routing, memory in rows:
        sizes = {"(1B)": ["1b"], "(0.5B)": ["350m"]}.get(published.split()[-1], ["100m", "350m", "1b"])
        for size, loss in zip(sizes, re.findall(r"\d\.\d{3}", published)):
            assert loss in (ROOT / "configs" / f"{method}_{size}.py").read_text(), (method, size)
        found = [dry_run(f"{method}_{size}") for size in ("100m", "350m", "1b")]
        assert [count for count, _ in found] == (routing.strip().split(" / ") if routing.strip() else ["0"] * 3), method
        assert [f"{gib:.1f}" for _, gib in found] == memory.split(" / "), method
    sparse = re.search(r"active a token, ([\d.]+), ([\d.]+) and\s([\d.]+) GiB a GPU", README).groups()
    assert [f"{dry_run(name)[1]:.2f}" for name in ("baseline_7b", "attnres_block_7b", "dar_block_7b")] == list(sparse)
    middle = re.search(r"needs an estimated ([\d.]+) GiB \(([\d.]+) for its control", README).groups()
    assert [f"{dry_run(f'midtrain_marin_8b_{kind}')[1]:.2f}" for kind in ("mhar", "plain")] == list(middle)


def test_the_compiled_contender_is_compiled():
    """For every number of sources, in a few graphs; torch would fall back to eager without a word."""
    counter = CompileCounter()
    reads = bench.Reads(tiny_config(residual="mhar", n_layer=8), 3, "cpu", torch.float32)
    rung = RUNGS["reference"]._replace(read=bench.compiled_read(backend=counter))
    reads.run(reads.history(rung.history, rung))
    assert counter.frame_count <= 3 and reads.query.grad.abs().sum() > 0


def test_bench(config_file, capsys, tmp_path):
    path = tmp_path / "new" / "b.json"
    bench.main(["step", str(config_file), "--rounds=2", "--steps=1", "--residuals=add,mhar,dar", f"--json={path}"])
    bench.main(["kernels", str(config_file), "--rounds=2", "--steps=1", "--residual=mhar", f"--json={path}"])
    bench.main(["sample", str(config_file), "--rounds=2", "--tokens=20", "--residuals=add,dar", f"--json={path}"])
    bench.main(["bytes", str(config_file), "--residual=mhar", f"--json={path}"])
    step, kernels, samples, moved = (found["rows"] for found in json.loads(path.read_text()).values())
    assert [r["residual"] for r in step] == ["add", "mhar", "dar"] and step[0]["ratio_median"] == 1.0
    assert all(r["tokens_per_s_low"] <= r["tokens_per_s_median"] <= r["tokens_per_s_high"] for r in step)
    assert step[0]["saved_mib"] < step[1]["saved_mib"] < step[2]["saved_mib"]
    assert [r["residual"] for r in samples] == ["add", "dar"] and samples[0]["ratio_low"] == 1.0 and samples[1]["over_no_cache_median"] > 0
    assert [r["kernels"] for r in kernels] == ["lean", "reference"]
    total = {r["buffer"]: r["mb_per_token"] for r in moved}
    assert total["total"] > total["bank"] > 0
    assert "1 [1, 1]" in capsys.readouterr().out
    with pytest.raises(model.ConfigError, match="residual='add' has no depth attention in place of"):
        bench.main(["kernels", str(config_file), "--residual=add"])
    with pytest.raises(model.ConfigError, match="--rounds must be at least 1, not 0"):
        bench.main(["step", str(config_file), "--rounds=0"])
