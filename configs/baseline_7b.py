# torchrun --standalone --nproc_per_node=8 train.py configs/baseline_7b.py
# 1,048,576 tokens a step = 256 sequences * 4,096 = 8 GPUs * 16 passes * 2 * 4,096; 52.4 B tokens in 50,000 steps
# 7,166,468,096 parameters, 1,396,416,512 active a token: a sparse mixture of experts of the size that the DAR paper trains
# (arXiv 2607.18730). Published: 7B, sparse experts, sequences of 4,096, blocks of 3 layers. Its losses and all else are not
# public. Our choice: every number below, after OLMoE and the mHC paper (6 of 64 experts and 2 shared, first layer dense).

data_dir = "data/pretrain"                # made with the Qwen3 tokenizer
vocab_size = 151_936
seq_len = 4096
n_layer = 24
n_head = 16
n_kv_head = 4
head_dim = 128
d_model = 2048
d_ff = 5632
moe_n_expert = 64
moe_top_k = 6
moe_n_shared = 2
moe_d_ff = 704
moe_n_dense = 1
residual = "add"

max_steps = 50_000
batch_tokens = 256 * 4096
micro_batch_size = 2
learning_rate = 4e-4
warmup_steps = 2000
weight_decay = 0.1
parallel = "fsdp"
checkpoint = "sublayer"
eval_interval = 500
eval_tokens = 4_194_304
save_interval = 1000
