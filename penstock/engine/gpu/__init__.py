"""Computing on a GPU: Triton kernels, their torch twins, and what a step looks like in device memory.

    step.py       row tables and the step buffer: all that a captured graph reads
    worklist.py   a step's attention cut into items that do not depend on the batch
    ops.py        the operations, as a contract; `torch_ops.py` and `triton_ops.py` implement it
    kernels/      Triton kernels, a file for each part of a step; they import nothing but triton
    layers.py     `Attention` and `Kernels` of the decoder on top of any `Ops`

Nothing here has been measured on a GPU yet. docs/design/004-gpu-execution.md has the reasons and the
estimates.
"""
