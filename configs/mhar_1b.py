# torchrun --standalone --nproc_per_node=8 train.py configs/mhar_1b.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 2 passes * 2 * 1,024
# Multi-Head Attention Residuals with H = 8 = number of KV heads.
# 186,880 routing parameters. Published validation loss (MHAR paper, Table 1): 2.754; baseline 2.894
from baseline_1b import *

residual = "mhar"
route_heads = 8
