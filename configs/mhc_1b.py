# torchrun --standalone --nproc_per_node=8 train.py configs/mhc_1b.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 2 passes * 2 * 1,024
# Manifold-constrained hyper-connections (arXiv 2512.24880), 4 streams: the DAR paper compares with them. Its losses of mHC are
# not public. Our choice: body and recipe, which are the MHAR paper's, and the initial values that model.MHC lists as ours.
from baseline_1b import *

residual = "mhc"
n_stream = 4
