# python train.py configs/demo.py        the Python library's own sources, byte by byte, on two CPU cores in minutes
# 1,024 tokens a step = 8 sequences * 128 tokens

data_dir = "data/demo"
vocab_size = 257                          # bytes and end of text
seq_len = 128
n_layer = 6
n_head = 4
n_kv_head = 4
d_model = 128
d_ff = 384
residual = "mhar"

max_steps = 1200
batch_tokens = 1024
micro_batch_size = 8
learning_rate = 2e-3
warmup_steps = 100
eval_interval = 200
eval_tokens = 65_536
save_interval = 400
