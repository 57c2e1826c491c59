# torchrun --standalone --nproc_per_node=8 train.py configs/midtrain_marin_8b_mhar.py
# 1,048,576 tokens a step = 256 sequences * 4,096 = 8 GPUs * 16 passes * 2 * 4,096; 9.96 B tokens in 9,500 steps
# after: python convert.py from_hf marin-community/marin-8b-base@phoenix --out out/marin_8b_mhar.pt --seq_len 4096
#        --residual delta --route_heads 8 --sites_per_block 8 --delta_entries recursive
# The MHAR paper's conversion of a trained model (its section 3.3): 786,496 routing parameters beside 8,030,261,248. Published:
#           MMLU   GPQA   GSM8K  MATH   HumanEval  MBPP
#     base  .554   .266   .190   .053   .122       .148
#     plain .643   .315   .470   .191   .409       .386
#     this  .645   .346   .502   .191   .415       .392
# delta_entries="recursive" is what its code does; its text describes "changes".
from midtrain_marin_8b_plain import *

init_from = "out/marin_8b_mhar.pt"
residual = "delta"
route_heads = 8
sites_per_block = 8
delta_entries = "recursive"
delta_gate = True
