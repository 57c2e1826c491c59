# torchrun --standalone --nproc_per_node=8 train.py configs/attnres_block_100m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# Attention Residuals in Block form, blocks of 2 layers as in the DAR paper (arXiv 2607.18730).
# Published there at 1B: 2.704, on a body, data and recipe that are not public. Body and recipe here are the MHAR paper's.
from baseline_100m import *

residual = "attnres"
sites_per_block = 4
