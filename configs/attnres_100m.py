# torchrun --standalone --nproc_per_node=8 train.py configs/attnres_100m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# Attention Residuals, Full form: every sublayer output is a source. 25,600 routing parameters.
# Published validation loss (MHAR paper, Table 1, "single"): 2.970; baseline 3.031
from baseline_100m import *

residual = "attnres"
