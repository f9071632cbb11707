"""Kernels of our own for GPUs, where torch's libraries sum in an order that depends on the number of rows: with these a row has the same bits in any
company, in training and in sampling. `kernel_probe` holds that against the machine, as it does on processors.

`kernels` is their source; `launch` says whether they are here, and what they take; `products`, `rows` and `attention` call them.
"""
