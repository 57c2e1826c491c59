# torchrun --standalone --nproc_per_node=8 train.py configs/mhar_h16_1b.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 2 passes * 2 * 1,024
# Multi-Head Attention Residuals with 16 heads, where splitting has gone too far. 186,880 routing parameters.
# Published validation loss (MHAR paper, Table 1, "H=16"): 2.825; baseline 2.894
from baseline_1b import *

residual = "mhar"
route_heads = 16
