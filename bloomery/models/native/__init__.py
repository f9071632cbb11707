"""Kernels in C on a CPU, mostly for float32: products, attention, the pointwise parts of a block, the head's reduction and the draw of tokens.

A step of few rows of a small model is little more than the calls that it makes, and torch makes ten of what is one here; a pass of many rows
reads and writes every activation as often. Where they cannot be compiled (`models/compiled`), and for other dtypes and devices, torch computes the
same formulas (`bindings.available`); which of the two is part of the numerics id. In bfloat16 there are products where the processor has tiles of it
(`half_gemm`), and updates of adapters (`low_rank`).

`bindings` has the compiled library, `buffers` the memory that its functions write to. `gemm`, `half_gemm` and `split_gemm` multiply, `low_rank` adds
the updates of adapters, `attention`, `pointwise` and `softmax` are the rest of a forward and its backward, `multinomial` draws tokens.
"""
