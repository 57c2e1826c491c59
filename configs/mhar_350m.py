# torchrun --standalone --nproc_per_node=8 train.py configs/mhar_350m.py
# Multi-Head Attention Residuals with H = 8 = number of KV heads.
# 100,352 routing parameters. Published validation loss (MHAR paper, Table 1): 2.848; baseline 2.997
from baseline_350m import *

residual = "mhar"
route_heads = 8
