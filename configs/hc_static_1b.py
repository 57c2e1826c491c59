# torchrun --standalone --nproc_per_node=8 train.py configs/hc_static_1b.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 2 passes * 2 * 1,024
# The MHAR paper's hyper-connections: 4 static streams, its simplified form (model.HCStatic), not that of the HC paper.
# Published validation loss (MHAR paper, Table 1, "HC"): 2.807; baseline 2.894
from baseline_1b import *

residual = "hc_static"
n_stream = 4
