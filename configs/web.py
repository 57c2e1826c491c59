# torchrun --standalone --nproc_per_node=8 train.py configs/mhar_350m.py configs/web.py
# A second config that changes the first: the MHAR paper's web recipe, FineWeb-Edu at a peak of 1e-3, with queries drawn from
# N(0, 0.02). Published validation loss (its Table 10; Table 12 and Fig. 5 have the same at 5e-4, or do not say):
#           baseline  hc_static  attnres  mhar
#     100m  3.336     3.322      3.297    3.287
#     350m  3.290     3.260      3.345    3.210
#     1b    3.175     3.172      3.315    3.111

data_dir = "data/web"                     # FineWeb-Edu, made with the Qwen3 tokenizer
learning_rate = 1e-3
query_init_std = 0.02
