# torchrun --standalone --nproc_per_node=8 train.py configs/attnres_350m.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 1 pass * 4 * 1,024
# Attention Residuals, Full form: every sublayer output is a source. 100,352 routing parameters.
# Published validation loss (MHAR paper, Table 1, "single"): 2.876; baseline 2.997
from baseline_350m import *

residual = "attnres"
