# torchrun --standalone --nproc_per_node=8 train.py configs/midtrain_marin_8b_plain.py
# 1,048,576 tokens a step = 256 sequences * 4,096 = 8 GPUs * 16 passes * 2 * 4,096; 9.96 B tokens in 9,500 steps
# after: python convert.py from_hf marin-community/marin-8b-base@phoenix --out out/marin_8b.pt --seq_len 4096
# Mid-training with the plain residual, the control of the MHAR paper's Table 3. 8,030,261,248 parameters. Published:
#           MMLU   GPQA   GSM8K  MATH   HumanEval  MBPP
#     base  .554   .266   .190   .053   .122       .148
#     this  .643   .315   .470   .191   .409       .386
# Stated there: peak and last learning rate, steps, tokens, EMA, z-loss, decay and what it spares, micro-batch. From its code:
# re-warmup, 1-sqrt, seed. Ours: an lm_head of its own decays, as it is no embedding; and the data, which it does not name.

init_from = "out/marin_8b.pt"
data_dir = "data/midtrain"                # made with the checkpoint's tokenizer
vocab_size = 128_256
seq_len = 4096
n_layer = 32
n_head = 32
n_kv_head = 8
d_model = 4096
d_ff = 14336
rope_theta = 500_000
rope_scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}
norm_eps = 1e-5
qk_norm = False
tie_embeddings = False
residual = "add"

max_steps = 9500
batch_tokens = 256 * 4096
micro_batch_size = 2
learning_rate = 4e-4
min_lr_ratio = 0.01
warmup_steps = 500
schedule = "1-sqrt"
weight_decay = 0.05
decay = "matrices"
z_loss = 1e-4
ema_decay = 0.999
seed = 0
parallel = "fsdp"
checkpoint = "sublayer"
