"""Attention backward for Hopper GPUs: a kernel that holds keys and streams the queries that see them, between two others.

`preprocess_kernel` writes the statistics of each row. Then `keys_kernel` or, for large head dims, `split_kernel` keeps dK and dV
in registers. dQ is added up in memory by the former and rounded by `postprocess_kernel`, or computed by `queries_kernel`.
"""
