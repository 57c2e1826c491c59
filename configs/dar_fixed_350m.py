# torchrun --standalone --nproc_per_node=8 train.py configs/dar_fixed_350m.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 1 pass * 4 * 1,024
# Ablation of DAR (arXiv 2607.18730, Table 4, 0.5B): stream 0 gives the keys, stream 1 the values (our reading).
# Published there: not public; DAR 2.653. Body (533 M parameters) and recipe here are the MHAR paper's.
from baseline_350m import *

residual = "dar_fixed"
sites_per_block = 2
