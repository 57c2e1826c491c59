# torchrun --standalone --nproc_per_node=8 train.py configs/attnres_block_350m.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 1 pass * 4 * 1,024
# Attention Residuals in Block form, blocks of 2 layers as in the DAR paper (arXiv 2607.18730).
# Published there at 1B: 2.704, on a body, data and recipe that are not public. Body and recipe here are the MHAR paper's.
from baseline_350m import *

residual = "attnres"
sites_per_block = 4
