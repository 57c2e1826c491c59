# python train.py configs/midtrain_demo.py        goes on from a plain demo model, converted (README, "Mid-training")
# The recipe of midtrain_marin_8b_mhar.py at the size of the demo, with averages of 0.99, as there are few steps.
from demo import *

init_from = "out/base.pt"
residual = "delta"
route_heads = 4
sites_per_block = 4
delta_gate = True

max_steps = 300
learning_rate = 1e-3
min_lr_ratio = 0.01
warmup_steps = 20
schedule = "1-sqrt"
weight_decay = 0.05
decay = "matrices"
z_loss = 1e-4
ema_decay = 0.99
eval_interval = 100
save_interval = 100
