"""Triton kernels: functions of pointers and sizes, launched by `triton_ops.py`.

They import nothing but triton, so that they can be compiled for a GPU on a machine that has none.
"""
