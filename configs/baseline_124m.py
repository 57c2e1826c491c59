# torchrun --standalone --nproc_per_node=8 train.py configs/baseline_124m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048
# The width control of the MHAR paper: 12 layers as baseline_100m, but 768 wide. Published: width, depth, KV heads. Our
# choice: 12 query heads and d_ff, with which the model has 220,516,608 parameters (the paper calls it 124M).
# Published validation loss (its Table 9, FineWeb-Edu, 5e-4, random queries): 3.220; baseline_100m on the same data 3.462
from baseline_100m import *

data_dir = "data/web"
n_head = 12
d_model = 768
d_ff = 3072
query_init_std = 0.02
