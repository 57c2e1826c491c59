# torchrun --standalone --nproc_per_node=8 train.py configs/mhar_124m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# Multi-Head Attention Residuals with H = 4 = number of KV heads (the paper does not say which H), at the width control of the MHAR paper.
# Published validation loss (its Table 9, FineWeb-Edu, 5e-4, random queries): 3.167; baseline 3.220
from baseline_124m import *

residual = "mhar"
route_heads = 4
