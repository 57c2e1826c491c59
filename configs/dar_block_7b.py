# torchrun --standalone --nproc_per_node=8 train.py configs/dar_block_7b.py
# 1,048,576 tokens a step = 256 sequences * 4,096 = 8 GPUs * 16 passes * 2 * 4,096
# Dual Attention Residuals in Block form, blocks of 3 layers as in the DAR paper's sparse models (arXiv 2607.18730). Its loss at
# 7B is not public; sizes and recipe are ours (baseline_7b.py).
from baseline_7b import *

residual = "dar"
sites_per_block = 6
