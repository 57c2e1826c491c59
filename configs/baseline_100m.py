# torchrun --standalone --nproc_per_node=8 train.py configs/baseline_100m.py
# 131,072 tokens a step = 64 sequences * 2,048 = 8 GPUs * 1 pass * 8 * 2,048; 2.621 B tokens in 20,000 steps
# 115,554,304 parameters. Body and recipe: MHAR paper (arXiv 2607.27230) section 3.1 and appendix I; like it, weights and
# optimizer state are bfloat16 and everything is decayed. Published validation loss (its Table 1, its own corpus): 3.031

data_dir = "data/pretrain"                # made with the Qwen3 tokenizer
vocab_size = 151_936
seq_len = 2048
n_layer = 12
n_head = 8
n_kv_head = 4
head_dim = 64
d_model = 512
d_ff = 1536
residual = "add"

max_steps = 20_000
batch_tokens = 64 * 2048
micro_batch_size = 8
learning_rate = 5e-4
warmup_steps = 1000
weight_decay = 0.1
param_dtype = "bfloat16"
eval_interval = 500
eval_tokens = 1_048_576
save_interval = 1000
