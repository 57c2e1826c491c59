"""Every file of configs/: what it says of itself is so, it can start, and at a tiny size it trains."""

import json
import math
import re
import time

import pytest

import train
from test_train import ROOT, corpus, log_of  # noqa: F401 (fixture)

FILES = {path.stem: path.read_text() for path in sorted((ROOT / "configs").glob("*.py"))}
RUNS = [name for name in FILES if name != "web"]         # web.py changes another

BODY = {"100m": 115_554_304, "350m": 533_123_072, "1b": 1_079_313_280}                # MHAR paper, section 3.1
ROUTING = {"100m": 25_600, "350m": 100_352, "1b": 186_880}
GRID = [f"{method}_{size}" for size in BODY for method in ("baseline", "hc_static", "attnres", "mhar", "mhar_h16")]
DUAL = [f"{method}_{size}" for size in BODY for method in ("mhc", "attnres_block", "dar", "dar_block")]
OTHERS = ["dar_selfkv_350m", "dar_crossv_350m", "dar_fixed_350m", "baseline_124m", "attnres_124m", "mhar_124m",
          "baseline_7b", "attnres_block_7b", "dar_block_7b", "demo", "midtrain_marin_8b_plain", "midtrain_marin_8b_mhar", "midtrain_demo"]

# MHAR paper: Table 1 (100M, 350M, 1B), its width control (Table 9, 768 wide), and DAR's public losses
PUBLISHED = {"baseline": "3.031 2.997 2.894", "hc_static": "2.999 2.931 2.807", "attnres": "2.970 2.876 2.759",
             "mhar": "2.969 2.848 2.754", "mhar_h16": "2.996 2.895 2.825"}
PUBLISHED = {f"{method}_{size}": loss for method, losses in PUBLISHED.items() for size, loss in zip(BODY, losses.split())}
PUBLISHED |= {"baseline_124m": "3.220", "attnres_124m": "3.187", "mhar_124m": "3.167", "dar_350m": "2.653", "dar_block_1b": "2.684",
              "attnres_block_1b": "2.704", "dar_selfkv_350m": "2.678", "dar_crossv_350m": "2.664"}


def dry_run(capsys, *argv):
    train.main([*argv, "--dry_run"])
    return capsys.readouterr().out


def test_every_row_has_its_file():
    assert sorted(GRID + DUAL + OTHERS) == sorted(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_header_says_how_to_start_and_what_a_batch_is(name, monkeypatch, capsys):
    head = re.match(r"(#.*\n)+", FILES[name]).group()
    launch = "python" if name.endswith("demo") else "torchrun --standalone --nproc_per_node=8"
    assert head.startswith(f"# {launch} train.py configs/{name}.py")
    config, model_config = train.load_config([name])
    if name.endswith("demo"):
        return
    total, sequences, gpus, passes, micro, seq_len = (int(n.replace(",", "")) for n in re.search(
        r"([\d,]+) tokens a step = ([\d,]+) sequences \* [\d,]+ = (\d) GPUs \* (\d+) pass(?:es)? \* (\d+) \* ([\d,]+)", head).groups())
    assert total == config.batch_tokens == sequences * seq_len == gpus * passes * micro * seq_len
    assert (micro, seq_len) == (config.micro_batch_size, model_config.seq_len)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert f"= 8 process(es) * {passes} pass(es) * {micro} * {seq_len};" in dry_run(capsys, name)
    assert "ublished" in head or "not public" in head or "not\n# public" in head
    assert name not in PUBLISHED or PUBLISHED[name] in head


@pytest.mark.parametrize("name", RUNS)
def test_dry_run_allocates_nothing_and_counts_what_the_papers_count(name, capsys):
    start = time.perf_counter()
    title = next(line for line in dry_run(capsys, name).splitlines() if line.startswith("residual="))
    assert time.perf_counter() - start < 20                               # seconds; a model of 7B made for real takes minutes
    total, routing = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) parameters.*, of them ([\d,]+) routing", title).groups())
    method, _, size = name.rpartition("_")
    if size in BODY:
        assert total - routing == BODY[size]
        if method in ("attnres", "mhar", "mhar_h16", "attnres_block"):
            assert routing == ROUTING[size]
        if method == "baseline":
            assert routing == 0 and f"{total:,} parameters" in FILES[name]
    elif name in ("baseline_124m", "baseline_7b"):
        assert f"{total:,} parameters" in FILES[name]
    if size == "7b":
        active = int(re.search(r"\(([\d,]+) active", title).group(1).replace(",", ""))
        assert 6.5e9 < total < 7.5e9 and f"{active - routing:,} active a token" in FILES["baseline_7b"]


TINY = dict(vocab_size=257, seq_len=16, n_layer=4, n_head=4, n_kv_head=2, head_dim=8, d_model=64, d_ff=32, max_steps=2, batch_tokens=64,
            micro_batch_size=2, eval_tokens=64, log_interval=1, warmup_steps=1, device="cpu")


@pytest.mark.parametrize("files", [*RUNS, "mhar_100m web"])
def test_two_steps_at_a_tiny_size(files, corpus, tmp_path):
    tiny = TINY | ({"moe_n_expert": 8, "moe_d_ff": 16} if files.endswith("7b") else {})
    tiny |= {"data_dir": corpus, "out_dir": tmp_path / "out"}
    if "midtrain" in files:                                              # they start from a checkpoint
        tiny["init_from"] = tmp_path / "start"
        train.main([files, *(f"--{k}={v}" for k, v in (tiny | dict(init_from=None, out_dir=tmp_path / "start", max_steps=1)).items())])
    train.main([*files.split(), *(f"--{k}={v}" for k, v in tiny.items())])
    log = log_of(tmp_path / "out")
    assert [r["step"] for r in log] == [1, 2] and all(math.isfinite(r["loss"]) for r in log) and abs(log[0]["loss"] - 5.55) < 0.2
    config = json.loads((tmp_path / "out/config.json").read_text())
    own = {key: value for key, value in train.read_config(train.find_config(files.split()[-1])).items() if key not in tiny}
    assert own and all(config[key] == value for key, value in own.items())


def test_web_recipe_on_another_config(capsys):
    """Table 10 of the MHAR paper by one more word."""
    plain, web = (train.load_config(files) for files in (["mhar_1b"], ["mhar_1b", "web"]))
    changed = {key for a, b in zip(plain, web) for key in vars(a) if getattr(a, key) != getattr(b, key)}
    assert changed == {"data_dir", "out_dir", "learning_rate", "query_init_std"}
    assert (web[0].learning_rate, web[1].query_init_std, web[0].out_dir) == (1e-3, 0.02, "out/mhar_1b_web")
    assert train.load_config(["mhar_1b", "web", "--learning_rate=5e-4"])[0].learning_rate == 5e-4
    assert train.load_config(["web", "mhar_1b"])[0].learning_rate == 5e-4         # the later file wins


def test_memory_of_the_large_configs_is_shared(monkeypatch, capsys):
    """dry_run under torchrun's WORLD_SIZE: FSDP divides weights, gradients and moments, DDP does not."""
    def held(*argv, world):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        return {name: float(value) for name, value in re.findall(r"(\w[\w ()]*?) ([\d.]+)[,;]", dry_run(capsys, *argv).splitlines()[-1])}
    one, eight, ddp = held("baseline_7b", world=1), held("baseline_7b", world=8), held("baseline_7b", "--parallel=ddp", world=8)
    for part in ("weights", "gradients", "AdamW moments"):
        key = next(k for k in one if k.endswith(part))
        assert ddp[key] == one[key] == pytest.approx(8 * eight[key], rel=1e-2)
