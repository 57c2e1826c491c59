# torchrun --standalone --nproc_per_node=8 train.py configs/dar_selfkv_350m.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 1 pass * 4 * 1,024
# Ablation of DAR (arXiv 2607.18730, Table 4, 0.5B): each stream's own entries are its keys.
# Published there: 2.678; DAR 2.653. Body (533 M parameters) and recipe here are the MHAR paper's.
from baseline_350m import *

residual = "dar_selfkv"
sites_per_block = 2
