# torchrun --standalone --nproc_per_node=8 train.py configs/baseline_350m.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 1 pass * 4 * 1,024; 0.655 B tokens in 20,000 steps
# 533,123,072 parameters. Body and recipe: MHAR paper (arXiv 2607.27230) section 3.1 and appendix I; like it, weights and
# optimizer state are bfloat16 and everything is decayed. Published validation loss (its Table 1, its own corpus): 2.997

data_dir = "data/pretrain"                # made with the Qwen3 tokenizer
vocab_size = 151_936
seq_len = 1024
n_layer = 24
n_head = 16
n_kv_head = 8
head_dim = 64
d_model = 1024
d_ff = 4096
residual = "add"

max_steps = 20_000
batch_tokens = 32 * 1024
micro_batch_size = 4
learning_rate = 5e-4
warmup_steps = 1000
weight_decay = 0.1
param_dtype = "bfloat16"
eval_interval = 500
eval_tokens = 1_048_576
save_interval = 1000
