"""Attention of ours in plain Triton, for CUDA, HIP and the emulator: a baseline to judge with, not a product.

``kernels`` follows the oracle's definition, ``attention`` launches it, ``targets`` declares it, and ``aiter`` gives it
the signatures of aiter's functions, so that code written for those can be driven where aiter does not run.
"""
