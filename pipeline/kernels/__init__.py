"""One op a file. `plain_x` is torch alone: it runs on the CPU, and tests compare with it. `triton_x` launches
the kernel. `x` is the registered op, which takes one or the other by device, and has no backward.

Ops that training needs as well are plain under their own name; `fused_x` or `x_` is then the op.
"""
