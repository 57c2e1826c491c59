"""For every test process: imports from the repository root, one thread, and fresh memory full of NaN."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                                   # read when kernels are defined

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
torch.set_num_threads(1)

# In this mode torch fills what torch.empty and its relatives return with NaN, so reading it before writing it shows.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
assert torch.empty(64).isnan().all() and torch.empty_like(torch.ones(64)).isnan().all()
