# torchrun --standalone --nproc_per_node=8 train.py configs/mhar_100m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# Multi-Head Attention Residuals with H = 4 = number of KV heads. (Table 1 is headed H = 8, but this model has 4 KV heads,
# and an earlier version of the paper heads the same numbers H = KV.)
# 25,600 routing parameters. Published validation loss (MHAR paper, Table 1): 2.969; baseline 3.031
from baseline_100m import *

residual = "mhar"
route_heads = 4
