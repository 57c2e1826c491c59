"""parallel=fsdp: processes under torchrun (gloo) that hold parts of the model, against one that holds all of it."""

import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save

import eval as eval_file
from checkpoints import Index, Reader, load_checkpoint, read
from model import GPT, ConfigError
from test_ddp import torchrun
from test_train import TINY, assert_equal_states, config_file, corpus, log_of, losses, run  # noqa: F401 (fixtures)

# 12 sequences of 16 tokens a step: passes of 2 by one, two or three processes
DETAILS = dict(batch_tokens=192, micro_batch_size=2, eval_tokens=400, eval_interval=4, save_interval=4, grad_clip=0.5,
               schedule="constant")
SPARSE = dict(moe_n_expert=3, moe_d_ff=16, moe_n_shared=1, moe_n_dense=1, moe_bias_rate=0.01)


@pytest.fixture
def several(config_file, tmp_path):
    """several(n, "name", key=value, ...) trains with n processes into tmp_path/name."""
    def go(n, name, **changes):
        code, output = torchrun("train.py", config_file, f"--out_dir={tmp_path / name}", "--parallel=fsdp",
                                *(f"--{k}={v}" for k, v in (DETAILS | changes).items()), n=n)
        assert code == 0, output
        return tmp_path / name
    return go


def assert_same_course(a, b, steps):
    a, b = log_of(a), log_of(b)
    assert [r["step"] for r in a][-steps:] == [r["step"] for r in b][-steps:]
    for x, y in zip(a[-steps:], b[-steps:]):
        for key in {"loss", "grad_norm", "val_loss", "val_loss_ema", "expert_load", "routing_entropy"} & x.keys():
            assert x[key] is y[key] is None or abs(x[key] - y[key]) < 1e-6, (x["step"], key, x[key], y[key])


@pytest.mark.parametrize("config", [
    dict(residual="dar", route_heads=2, ema_decay=0.5, dropout=0.1),
    dict(residual="mhc", mhc_readout="learned", checkpoint="sublayer", tie_embeddings=False, **SPARSE),
    dict(residual="delta", delta_gate=True, sites_per_block=2, z_loss=1e-3)], ids=lambda c: c["residual"])
def test_two_processes_equal_one(several, run, config):
    one, two = run("one", **DETAILS | config, max_steps=20), several(2, "two", **config, max_steps=20)
    assert len(losses(one)) == 20 and losses(one)[20] < losses(one)[1] - 0.02
    assert_same_course(one, two, 20)
    whole, shards = load_checkpoint(one, moments=True), load_checkpoint(two, moments=True)
    assert whole.keys() == shards.keys()
    assert "moe_d_ff" not in config or whole["model"]["sublayers.3.bias"].abs().max() > 0
    for tree in ("model", "exp_avg", "exp_avg_sq", *["ema"] * ("ema_decay" in config)):
        assert whole[tree].keys() == shards[tree].keys()
        for name, value in whole[tree].items():
            assert value.shape == shards[tree][name].shape and torch.allclose(value, shards[tree][name], atol=2e-5), (tree, name)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, corpus):
    """A run of two processes after 8 of 12 steps, and one that went on to the end."""
    folder = tmp_path_factory.mktemp("stopped")
    file = folder / "config.py"
    file.write_text("\n".join(f"{k} = {v!r}" for k, v in (TINY | {"data_dir": str(corpus)}).items()))
    details = DETAILS | SPARSE | dict(residual="mhar", ema_decay=0.5, parallel="fsdp")
    for steps, name in ((8, "part"), (12, "whole")):
        code, output = torchrun("train.py", file, f"--out_dir={folder / name}", *(f"--{k}={v}" for k, v in details.items()),
                                f"--max_steps={steps}", n=2)
        assert code == 0, output
    return folder


def go_on(stopped, tmp_path, n, **changes):
    """Continue a copy of the stopped run with n processes (0 = without torchrun) -> its folder."""
    shutil.copytree(stopped / "part", tmp_path / "part", dirs_exist_ok=True)
    arguments = DETAILS | SPARSE | dict(residual="mhar", ema_decay=0.5, out_dir=tmp_path / "part", max_steps=12) | changes
    code, output = torchrun("train.py", stopped / "config.py", *(f"--{k}={v}" for k, v in arguments.items()), n=n)
    assert code == 0 and "resumed" in output, output
    return tmp_path / "part"


@pytest.mark.parametrize("n, parallel", [(0, "fsdp"), (1, "fsdp"), (3, "fsdp"), (2, "ddp")])
def test_resumes_with_any_number_of_processes(stopped, tmp_path, n, parallel):
    folder = go_on(stopped, tmp_path, n, parallel=parallel)
    assert_same_course(stopped / "whole", folder, 4)
    assert ("shards" in read(folder / "ckpt/latest.pt")) == (n > 0 and parallel == "fsdp")
    if n == 3:                                                            # and back: three processes wrote, one reads
        (folder / "log.jsonl").unlink()
        go = load_checkpoint(folder, moments=True)
        assert go["step"] == 12 and go["exp_avg_sq"].keys() == dict(GPT.from_checkpoint(go).named_parameters()).keys()


def test_whole_checkpoints_are_dealt_out(run, several, tmp_path):
    whole = run("a", **DETAILS, max_steps=4, residual="dar", ema_decay=0.5)
    on = run("b", **DETAILS, max_steps=8, residual="dar", ema_decay=0.5, resume=whole)
    parts = several(2, "c", max_steps=8, residual="dar", ema_decay=0.5, resume=whole)
    assert_same_course(on, parts, 4)


def test_the_same_number_of_processes_goes_on_bit_for_bit(stopped, tmp_path):
    folder = go_on(stopped, tmp_path, 2, parallel="fsdp")
    assert_equal_states(stopped / "whole", folder)
    assert losses(folder) == losses(stopped / "whole")


def test_shards_serve_whoever_reads_a_checkpoint(stopped, capsys):
    model = GPT.from_checkpoint(stopped / "part")
    assert set(load_checkpoint(stopped / "part")) == {"step", "best_val_loss", "config", "data", "tokenizer", "model", "ema"}
    eval_file.main(["loss", str(stopped / "part"), "--tokens", "400", "--weights", "ema"])
    logged = [r["val_loss_ema"] for r in log_of(stopped / "part") if "val_loss_ema" in r][-1]
    assert f"{logged:.4f}" in capsys.readouterr().out
    assert torch.equal(model.sublayers[3].bias, load_checkpoint(stopped / "part")["model"]["sublayers.3.bias"])


def test_old_shards_go_and_the_best_stay(stopped, tmp_path):
    folder = go_on(stopped, tmp_path, 0, parallel="fsdp", keep_last=1, max_steps=9, eval_interval=100, learning_rate=1e3)
    names = sorted(p.name for p in (folder / "ckpt").iterdir())
    assert names == ["best.pt", "latest.pt", "step_00000008", "step_00000009.pt"]
    assert load_checkpoint(folder / "ckpt/best.pt")["step"] == 8 and load_checkpoint(folder)["step"] == 9


@pytest.fixture
def broken(stopped, tmp_path):
    shutil.copytree(stopped / "part/ckpt", tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.mark.parametrize("damage", ["no folder", "no index", "no shard", "cut shard", "cut index"])
def test_broken_shards_are_told(broken, damage):
    folder = broken / read(broken / "latest.pt")["shards"]
    shard = max(folder.glob("*.distcp"), key=os.path.getsize)
    if damage == "no folder":
        shutil.rmtree(folder)
    elif damage.startswith("no"):
        (shard if damage == "no shard" else folder / ".metadata").unlink()
    else:
        path = shard if damage == "cut shard" else folder / ".metadata"
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ConfigError, match=f"the shards in {folder} (are incomplete|cannot be read)") as e:
        load_checkpoint(broken / "latest.pt")
    assert "\n" not in str(e.value)


def test_an_index_executes_nothing(broken):
    class Trap:
        def __reduce__(self):
            return os.system, ("echo trapped",)

    folder = broken / read(broken / "latest.pt")["shards"]
    (folder / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ConfigError, match="index names .*system, which no checkpoint needs"):
        load_checkpoint(broken / "latest.pt")


def test_the_index_reader_knows_all_that_is_written(tmp_path):
    """Every dtype of weights and buffers, against the library's own reader."""
    tensors = {f"model/{t}": torch.ones(3).to(t) for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64,
                                                           torch.int64, torch.int32, torch.uint8, torch.bool)}
    save(tensors, storage_writer=FileSystemWriter(tmp_path / "x"), no_dist=True)
    found = Reader(tmp_path / "x").read_metadata()
    assert found.state_dict_metadata == FileSystemReader(tmp_path / "x").read_metadata().state_dict_metadata
    assert found.storage_data.keys() == FileSystemReader(tmp_path / "x").read_metadata().storage_data.keys()
