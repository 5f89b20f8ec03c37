import os

# GPU kernels run in Triton's interpreter, on the CPU. Triton reads this when it is imported, which others do too: so here.
os.environ["TRITON_INTERPRET"] = "1"
