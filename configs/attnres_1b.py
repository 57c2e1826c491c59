# torchrun --standalone --nproc_per_node=8 train.py configs/attnres_1b.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 2 passes * 2 * 1,024
# Attention Residuals, Full form: every sublayer output is a source. 186,880 routing parameters.
# Published validation loss (MHAR paper, Table 1, "single"): 2.759; baseline 2.894
from baseline_1b import *

residual = "attnres"
