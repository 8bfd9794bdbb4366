"""Attention backward for Hopper GPUs: one kernel holds keys and streams the queries that see them, two small ones stand around it.

`prepare_kernel` (edges) writes the statistics of each row and clears dQ; `keys_kernel` or, for large head dims, `split_kernel`
computes dK and dV in registers and adds dQ up in memory; `cast_kernel` (edges) rounds dQ.
"""
