# torchrun --standalone --nproc_per_node=8 train.py configs/attnres_124m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# Attention Residuals, Full form, at the width control of the MHAR paper.
# Published validation loss (its Table 9, FineWeb-Edu, 5e-4, random queries): 3.187; baseline 3.220
from baseline_124m import *

residual = "attnres"
