# torchrun --standalone --nproc_per_node=8 train.py configs/mhc_100m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# Manifold-constrained hyper-connections (arXiv 2512.24880), 4 streams: the DAR paper compares with them. Its losses of mHC are
# not public. Our choice: body and recipe, which are the MHAR paper's, and the initial values that model.MHC lists as ours.
from baseline_100m import *

residual = "mhc"
n_stream = 4
