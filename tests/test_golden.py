"""
Losses of the first 20 steps of every pathway at a tiny size, as they were when last looked at: any change of what is
computed shows. Within 2e-4 of the stored ones, as summation order differs between processors (the losses fall by 3).

    python tests/test_golden.py        writes golden_losses.json anew, after a change that is meant
"""

import json
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import pytest
import torch

import train
from helpers import write_corpus
from model import PATHWAYS

FILE = Path(__file__).with_name("golden_losses.json")
CASES = {name: {"residual": name} for name in PATHWAYS} | {
    "attnres_block": {"residual": "attnres", "sites_per_block": 4}, "mhar_block": {"residual": "mhar", "sites_per_block": 3},
    "dar_block": {"residual": "dar", "sites_per_block": 4}, "dar_multi_head": {"residual": "dar", "route_heads": 2},
    "delta_block": {"residual": "delta", "sites_per_block": 2, "delta_gate": True},
    "delta_recursive": {"residual": "delta", "sites_per_block": 2, "delta_entries": "recursive", "route_heads": 2},
    "mhc_learned": {"residual": "mhc", "mhc_readout": "learned"}}


def first_losses(folder, data, **changes):
    config = {"data_dir": data, "out_dir": folder, "vocab_size": 257, "seq_len": 32, "n_layer": 3, "n_head": 4, "n_kv_head": 2,
              "d_model": 32, "d_ff": 64, "max_steps": 20, "batch_tokens": 256, "micro_batch_size": 8, "learning_rate": 1e-2,
              "warmup_steps": 5, "eval_interval": 100, "eval_tokens": 256, "log_interval": 1, "device": "cpu"} | changes
    path = folder.with_suffix(".py")
    path.write_text("\n".join(f"{k} = {str(v)!r}" if isinstance(v, Path) else f"{k} = {v!r}" for k, v in config.items()))
    train.main([str(path)])
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_first_losses(name, tmp_path):
    stored = json.loads(FILE.read_text())
    assert stored.keys() == CASES.keys()
    found = first_losses(tmp_path / name, write_corpus(tmp_path / "data"), **CASES[name])
    assert found == pytest.approx(stored[name], abs=2e-4, rel=0)
    assert len(found) == 20 and found[0] - found[-1] > 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = write_corpus(Path(folder) / "data")
        golden = {name: first_losses(Path(folder) / name, data, **changes) for name, changes in CASES.items()}
    FILE.write_text(json.dumps({k: [round(x, 6) for x in v] for k, v in golden.items()}, indent=None).replace("], ", "],\n ") + "\n")
