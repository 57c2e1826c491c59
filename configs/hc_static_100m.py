# torchrun --standalone --nproc_per_node=8 train.py configs/hc_static_100m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# The MHAR paper's hyper-connections: 4 static streams, its simplified form (model.HCStatic), not that of the HC paper.
# Published validation loss (MHAR paper, Table 1, "HC"): 2.999; baseline 3.031
from baseline_100m import *

residual = "hc_static"
n_stream = 4
