"""The Gluon dialect: layouts, shared memory, AMD's buffer, copy and matrix operations, over the same values.

A kernel in Gluon names the layout of each block. Here a layout is checked and then changes nothing; what remains are
functions over `Value`, so Gluon kernels run batched as Triton's do, under the same sanitizers.
"""
