"""Call a target on an instance: its own convention in, named outputs out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz.buffers import DTYPES
from fuzz.case import Case
from fuzz.instance import Instance
from fuzz.instance.operands import scale_of
from oracle.convention import Convention, DefaultScale, LseLayout, WindowMeaning
from oracle.declare import Declaration, parameters
from oracle.kinds import Operation


class Unsupported(Exception):
    """Raised by an adapter for what its target declares not to do here. The message is the reason."""


class ResultError(Exception):
    """The target returned something else than its operation returns."""


def arguments(declaration: Declaration, instance: Instance) -> dict[str, Any]:
    """Arguments for ``declaration.function``, in the target's convention."""
    case = instance.case
    wanted = parameters(declaration.operation, declaration.convention, declaration.task)
    given: dict[str, Any] = dict.fromkeys(wanted)
    if case.is_attention:
        given |= _options(case, declaration.convention)
    elif case.operation is Operation.INDEX_BUILD and instance.indices is not None:
        given |= {"parts": case.parts, "rank": case.rank, "total": len(instance.indices)}
    given |= {name: buffer.view for name, buffer in instance.buffers.items()}
    return {name: given[name] for name in wanted}


def _options(case: Case, convention: Convention) -> dict[str, Any]:
    window = None
    if convention.window.meaning is not WindowMeaning.UNSUPPORTED:
        try:
            window = convention.window.argument(case.window, causal=case.causal)
        except ValueError as error:
            raise Unsupported(str(error)) from None
    by_default = convention.default_scale is DefaultScale.RSQRT_HEAD_DIM
    return {
        "causal": case.causal,
        "scale": case.scale if by_default else scale_of(case),
        "soft_cap": case.soft_cap,
        "window": window,
    }


def call(declaration: Declaration, instance: Instance) -> dict[str, Tensor]:
    """Run the target once.

    Returns its outputs by name: none for kv_write (the caches are written in place), ``key`` and ``value``
    for kv_gather, ``out`` and perhaps ``lse`` for attention and merges, ``indices`` for index_build; a backend
    writes the caches and returns ``out``. Raises ``ResultError`` for any other result.
    """
    outputs = _named(declaration.operation, declaration.function(**arguments(declaration, instance)))
    layout = declaration.convention.lse_layout
    if "out" in outputs and ("lse" in outputs) != (layout is not LseLayout.NONE):
        have = "a" if "lse" in outputs else "no"
        raise ResultError(f"lse: {have} log-sum-exp returned; convention.lse_layout says {layout}")
    expected = expected_outputs(instance, declaration)
    for name, value in outputs.items():
        shape, dtype = expected[name]
        if tuple(value.shape) != shape or (dtype is not None and value.dtype != dtype):
            wanted = f"{dtype or 'any dtype'} {list(shape)}"
            raise ResultError(f"{name}: {value.dtype} {list(value.shape)}; expected {wanted}")
    return outputs


_RETURNS: dict[Operation, tuple[tuple[str, ...], ...]] = {
    Operation.KV_WRITE: ((),),
    Operation.KV_GATHER: (("key", "value"),),
    Operation.VARLEN_EXTEND: (("out",), ("out", "lse")),
    Operation.PAGED_DECODE: (("out",), ("out", "lse")),
    Operation.LSE_MERGE: (("out",), ("out", "lse")),
    Operation.INDEX_BUILD: (("indices",),),
    Operation.BACKEND: (("out",),),
}


def _named(operation: Operation, result: object) -> dict[str, Tensor]:
    values = result if isinstance(result, tuple) else () if result is None else (result,)
    for names in _RETURNS[operation]:
        if len(names) == len(values) and all(isinstance(v, Tensor) for v in values):
            return dict(zip(names, values, strict=True))
    wanted = " or ".join("(" + ", ".join(names) + ")" if names else "None" for names in _RETURNS[operation])
    got = ", ".join(type(v).__name__ for v in values) or "None"
    raise ResultError(f"returned ({got}); expected {wanted}")


def expected_outputs(
    instance: Instance, declaration: Declaration
) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of each output; dtype None: any."""
    case = instance.case
    if case.operation is Operation.KV_WRITE:
        return {}
    if case.operation is Operation.KV_GATHER:
        pairs = zip(("key", "value"), instance.linear.values(), strict=True)
        return {name: (tuple(data.shape), data.dtype) for name, data in pairs}
    if instance.indices is not None:
        return {"indices": (tuple(instance.indices.shape), None)}
    merge = case.operation is Operation.LSE_MERGE
    rows = sum(case.context_lens if merge else case.query_lens)
    heads = case.num_kv_heads if merge else case.num_q_heads
    turned = declaration.convention.lse_layout is LseLayout.HEAD_TOKEN
    precision = declaration.precision_for(case.dtype, case.kv_dtype)
    # Attention over an fp8 query gives bfloat16.
    own = torch.bfloat16 if DTYPES[case.dtype].itemsize == 1 else DTYPES[case.dtype]
    return {
        "out": ((rows, heads, case.v_head_dim), None if merge else own),
        "lse": ((heads, rows) if turned else (rows, heads), DTYPES[precision.lse_dtype]),
    }
