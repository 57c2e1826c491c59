# torchrun --standalone --nproc_per_node=8 train.py configs/dar_block_350m.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 1 pass * 4 * 1,024
# Dual Attention Residuals in Block form. Published: the method and blocks of 2 layers (arXiv 2607.18730; its 1B loss,
# 2.684 against 2.704 of attnres_block, is on a body, data and recipe that are not public). Our choice: body and recipe,
# which are the MHAR paper's, and the details that model.DAR lists as inferred.
from baseline_350m import *

residual = "dar"
sites_per_block = 4
