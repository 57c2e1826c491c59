# torchrun --standalone --nproc_per_node=8 train.py configs/dar_100m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# Dual Attention Residuals, Full form: one source a layer (2 sites). Published: the method (arXiv 2607.18730; its 0.5B
# loss, 2.653, is on a body, data and recipe that are not public). Our choice: body and recipe, which are the MHAR paper's,
# and the details that model.DAR lists as inferred.
from baseline_100m import *

residual = "dar"
sites_per_block = 2
