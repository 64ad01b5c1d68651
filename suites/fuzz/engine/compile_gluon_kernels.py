"""Gluon kernels for the compile gate's tests: loaded as source, never imported."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def copy(source, target, LANES: gl.constexpr):
    """Its layout is for warps of LANES lanes: right on AMD with 64, on NVIDIA with 32."""
    layout: gl.constexpr = gl.BlockedLayout([1], [LANES], [4], [0])
    place = gl.arange(0, 256, layout=layout)
    gl.store(target + place, gl.load(source + place))
