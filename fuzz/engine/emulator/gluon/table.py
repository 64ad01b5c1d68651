"""Gluon's table: every name of `triton.experimental.gluon` and its language that kernels may use.

To add a function, write it over `Value` in one of the modules beside this one and enter it here under the path that
kernels write (`amd.cdna3.mfma`); `certify` asks for a reference of every function entered.
"""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from fuzz.engine.emulator import atomics, blocks, lang, mathematics
from fuzz.engine.emulator.casts import cast
from fuzz.engine.emulator.errors import KernelError
from fuzz.engine.emulator.gluon import buffers, layouts, matrix, program
from fuzz.engine.emulator.gluon.shared import SharedMemory
from fuzz.engine.emulator.operators import arithmetic, bitwise
from fuzz.engine.emulator.value import Value

# Distributions of Triton under other names, whose modules are the same here.
FORKS = ("tokenspeed_triton",)


def _arange(start: Any, end: Any, layout: Any = None, **_: Any) -> Value:
    """Integers start .. end - 1."""
    result = blocks.arange(start, end)
    layouts.check_distributed(layout, result.shape)
    return result


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None, **_: Any) -> Value:
    """A block of one value."""
    result = blocks.full(shape, value, dtype)
    layouts.check_distributed(layout, result.shape)
    return result


def _zeros(shape: Any, dtype: Any, layout: Any = None, **_: Any) -> Value:
    """A block of zeros."""
    return _full(shape, 0, dtype, layout)


def _convert_layout(value: Value, layout: Any, assert_trivial: bool = False, **_: Any) -> Value:
    """The same block in another layout."""
    if layout is None or not isinstance(value, Value) or not value.shape:
        raise KernelError("convert_layout takes a block and a layout")
    layouts.check_distributed(layout, value.shape)
    return value


def _num_warps(*_: Any, **__: Any) -> int:
    """Warps of a program, known at compile time."""
    return layouts.machine.warps


def _to_linear_layout(layout: Any, shape: Any, **_: Any) -> Any:
    """A layout as it is: its linear form has no meaning here."""
    layouts.check_distributed(layout, tuple(int(size) for size in shape))
    return layout


def _nothing(*_: Any, **__: Any) -> None:
    """Barriers and hints to a scheduler: programs run their statements in order here."""


def _atomic(update: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    return buffers.buffer_atomic(atomics.atomic(update))


def _kept(function: Callable[..., Value]) -> Callable[[Value, Value], Value]:
    return lambda old, value: cast(function(old, value), old.dtype)


_BUFFER: dict[str, Callable[..., Any]] = {
    "buffer_atomic_add": _atomic(lambda old, value: arithmetic("add", old, value)),
    "buffer_atomic_and": _atomic(lambda old, value: bitwise("and", old, value)),
    "buffer_atomic_max": _atomic(_kept(mathematics.maximum)),
    "buffer_atomic_min": _atomic(_kept(mathematics.minimum)),
    "buffer_atomic_or": _atomic(lambda old, value: bitwise("or", old, value)),
    "buffer_atomic_xchg": _atomic(lambda old, value: cast(value, old.dtype)),
    "buffer_atomic_xor": _atomic(lambda old, value: bitwise("xor", old, value)),
    "buffer_load": buffers.buffer_load,
    "buffer_store": buffers.buffer_store,
    "mfma": matrix.mfma,
}
_ASYNC: dict[str, Callable[..., Any]] = {
    "buffer_load_to_shared": buffers.buffer_load_to_shared,
    "commit_group": buffers.commit_group,
    "global_load_to_shared": buffers.global_load_to_shared,
    "load_shared_relaxed": buffers.load_shared_relaxed,
    "wait_group": buffers.wait_group,
}

# Functions that Gluon adds to Triton's, by the path below `triton.experimental.gluon.language`.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "allocate_shared_memory": SharedMemory.allocate,
    "arange": _arange,
    "barrier": _nothing,
    "convert_layout": _convert_layout,
    "dot_fma": matrix.dot_fma,
    "full": _full,
    "num_warps": _num_warps,
    "set_auto_layout": _convert_layout,
    "thread_barrier": _nothing,
    "to_linear_layout": _to_linear_layout,
    "zeros": _zeros,
    **{f"amd.cdna3.{name}": function for name, function in _BUFFER.items()},
    **{f"amd.cdna4.{name}": function for name, function in _BUFFER.items()},
    "amd.cdna4.compute_efficient_padded_shared_layout": layouts.efficient_padded_layout,
    "amd.cdna4.get_mfma_scale_layout": layouts.mfma_scale_layout,
    "amd.cdna4.mfma_scaled": matrix.mfma_scaled,
    **{f"amd.cdna4.async_copy.{name}": function for name, function in _ASYNC.items()},
}

_LAYOUTS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        layouts.AutoLayout,
        layouts.BlockedLayout,
        layouts.CoalescedLayout,
        layouts.DistributedLinearLayout,
        layouts.DotOperandLayout,
        layouts.PaddedSharedLayout,
        layouts.SliceLayout,
        layouts.SwizzledSharedLayout,
    )
}

# Names of Triton's language that Gluon's lacks.
_NOT_GLUON = ("dot", "trans", "view")

# Scheduling hints of a vendor's own build. Sources fall back to their own where an import of these fails, as it does
# with the released Triton.
_UNRELEASED = frozenset(("sched_barrier", "sched_group_barrier", "set_prio"))


class GluonModule(lang.SubstituteModule):
    """A module of Gluon."""

    def __getattr__(self, name: str) -> Any:
        if name in _UNRELEASED:
            raise AttributeError(name)
        return super().__getattr__(name)


def _below(path: str) -> dict[str, Any]:
    """The functions of one module: those whose path is `path` and one name."""
    head = f"{path}." if path else ""
    return {
        name[len(head) :]: function
        for name, function in FUNCTIONS.items()
        if name.startswith(head) and "." not in name[len(head) :]
    }


def modules() -> dict[str, ModuleType]:
    """Fresh substitutes for `triton` with Gluon, and for its forks, by full name."""
    known = lang.modules()
    top, language = known["triton"], known["triton.language"]
    setattr(known["triton.language.core"], "_aggregate", program.aggregate)  # noqa: B010 - a module made at run time
    name = "triton.experimental.gluon.language"
    copies = GluonModule(f"{name}.amd.cdna4.async_copy", "gl.amd.cdna4.async_copy", _below("amd.cdna4.async_copy"))
    cdna3 = GluonModule(f"{name}.amd.cdna3", "gl.amd.cdna3", _below("amd.cdna3"))
    cdna4 = GluonModule(
        f"{name}.amd.cdna4",
        "gl.amd.cdna4",
        {**_below("amd.cdna4"), "AMDMFMALayout": layouts.AMDMFMALayout, "async_copy": copies},
    )
    amd_names = {
        "AMDMFMALayout": layouts.AMDMFMALayout,
        "cdna3": cdna3,
        "cdna4": cdna4,
        "warp_pipeline_stage": program.Stage,
    }
    amd = GluonModule(f"{name}.amd", "gl.amd", amd_names)
    gl = GluonModule(name, "gl", {**_language(language), "amd": amd})
    gl_core = GluonModule(f"{name}._core", "gl", {**_public(gl), "builtin": program.builtin})
    gluon_names = {
        "aggregate": program.aggregate,
        "constexpr_function": program.constexpr_function,
        "jit": program.jit,
        "language": gl,
    }
    gluon = GluonModule("triton.experimental.gluon", "gluon", gluon_names)
    experimental = GluonModule("triton.experimental", "triton.experimental", {"gluon": gluon})
    setattr(top, "experimental", experimental)  # noqa: B010
    added = (experimental, gluon, gl, gl_core, amd, cdna3, cdna4, copies)
    known.update({module.__name__: module for module in added})
    return {**known, **_forked(known.items())}


def _language(triton: ModuleType) -> dict[str, Any]:
    """`gl`: what Triton's language has, Gluon's own, layouts."""
    shared = {name: value for name, value in _public(triton).items() if name not in _NOT_GLUON}
    own = {
        "DistributedLayout": layouts.DistributedLayout,
        "SharedLayout": layouts.SharedLayout,
        "shared_memory_descriptor": SharedMemory,
        "tensor": program.TensorType,
    }
    return {**shared, **_below(""), **_LAYOUTS, **own}


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _forked(known: Iterable[tuple[str, ModuleType]]) -> dict[str, ModuleType]:
    return {f"{fork}{name.removeprefix('triton')}": module for fork in FORKS for name, module in known}
