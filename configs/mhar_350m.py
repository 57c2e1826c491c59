# torchrun --standalone --nproc_per_node=8 train.py configs/mhar_350m.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 1 pass * 4 * 1,024
# Multi-Head Attention Residuals with H = 8 = number of KV heads.
# 100,352 routing parameters. Published validation loss (MHAR paper, Table 1): 2.848; baseline 2.997
from baseline_350m import *

residual = "mhar"
route_heads = 8
