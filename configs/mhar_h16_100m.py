# torchrun --standalone --nproc_per_node=8 train.py configs/mhar_h16_100m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# Multi-Head Attention Residuals with 16 heads, where splitting has gone too far. 25,600 routing parameters.
# Published validation loss (MHAR paper, Table 1, "H=16"): 2.996; baseline 3.031
from baseline_100m import *

residual = "mhar"
route_heads = 16
