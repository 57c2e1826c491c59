# torchrun --standalone --nproc_per_node=8 train.py configs/attnres_100m.py
# Attention Residuals, Full form: every sublayer output is a source. 25,600 routing parameters.
# Published validation loss (MHAR paper, Table 1, "single"): 2.970; baseline 3.031
from baseline_100m import *

residual = "attnres"
