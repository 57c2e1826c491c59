# torchrun --standalone --nproc_per_node=8 train.py configs/hc_static_350m.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 1 pass * 4 * 1,024
# The MHAR paper's hyper-connections: 4 static streams, its simplified form (model.HCStatic), not that of the HC paper.
# Published validation loss (MHAR paper, Table 1, "HC"): 2.931; baseline 2.997
from baseline_350m import *

residual = "hc_static"
n_stream = 4
