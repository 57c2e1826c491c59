# torchrun --standalone --nproc_per_node=8 train.py configs/baseline_1b.py
# 32,768 tokens a step = 32 sequences * 1,024 = 8 GPUs * 2 passes * 2 * 1,024; 0.655 B tokens in 20,000 steps
# 1,079,313,280 parameters. Body and recipe: MHAR paper (arXiv 2607.27230) section 3.1 and appendix I; like it, weights and
# optimizer state are bfloat16 and everything is decayed. Published validation loss (its Table 1, its own corpus): 2.894

data_dir = "data/pretrain"                # made with the Qwen3 tokenizer
vocab_size = 151_936
seq_len = 1024
n_layer = 36
n_head = 16
n_kv_head = 8
head_dim = 80
d_model = 1280
d_ff = 5120
residual = "add"

max_steps = 20_000
batch_tokens = 32 * 1024
micro_batch_size = 2
learning_rate = 5e-4
warmup_steps = 1000
weight_decay = 0.1
param_dtype = "bfloat16"
eval_interval = 500
eval_tokens = 1_048_576
save_interval = 1000
