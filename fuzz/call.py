"""Call a target on an instance: its own convention in, named outputs out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz.case import Case
from fuzz.instance import Instance
from oracle.convention import Convention, DefaultScale, WindowMeaning
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
    needed = convention.default_scale is DefaultScale.REQUIRED and case.scale is None
    window = None
    if convention.window.meaning is not WindowMeaning.UNSUPPORTED:
        window = convention.window.argument(case.window)
    return {
        "causal": case.causal,
        "scale": case.head_dim**-0.5 if needed else case.scale,
        "soft_cap": case.soft_cap,
        "window": window,
    }


def call(declaration: Declaration, instance: Instance) -> dict[str, Tensor]:
    """Run the target once.

    Returns its outputs by name: none for kv_write (the caches are written in place), ``key`` and ``value``
    for kv_gather, ``out`` and perhaps ``lse`` for attention and merges, ``indices`` for index_build. Raises
    ``ResultError`` for any other result.
    """
    result = declaration.function(**arguments(declaration, instance))
    names = _output_names(declaration.operation, result)
    values = result if isinstance(result, tuple) else () if result is None else (result,)
    outputs = dict(zip(names, values, strict=True))
    for name, (shape, dtype) in expected_outputs(instance).items():
        value = outputs.get(name)
        if value is None:
            continue
        if tuple(value.shape) != shape or (dtype is not None and value.dtype != dtype):
            wanted = f"{dtype or 'any dtype'} {list(shape)}"
            raise ResultError(f"{name}: {value.dtype} {list(value.shape)}; expected {wanted}")
    return outputs


_RETURNS: dict[Operation, tuple[tuple[str, ...], ...]] = {
    Operation.KV_WRITE: ((),),
    Operation.KV_GATHER: (("key", "value"),),
    Operation.VARLEN_EXTEND: (("out",), ("out", "lse")),
    Operation.PAGED_DECODE: (("out",), ("out", "lse")),
    Operation.LSE_MERGE: (("out", "lse"),),
    Operation.INDEX_BUILD: (("indices",),),
}


def _output_names(operation: Operation, result: object) -> tuple[str, ...]:
    values = result if isinstance(result, tuple) else () if result is None else (result,)
    for names in _RETURNS[operation]:
        if len(names) == len(values) and all(isinstance(v, Tensor) for v in values):
            return names
    wanted = " or ".join("(" + ", ".join(names) + ")" if names else "None" for names in _RETURNS[operation])
    got = ", ".join(type(v).__name__ for v in values) or "None"
    raise ResultError(f"returned ({got}); expected {wanted}")


def expected_outputs(instance: Instance) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of each output; dtype None: any."""
    case = instance.case
    if case.operation is Operation.KV_GATHER:
        pairs = zip(("key", "value"), instance.linear.values(), strict=True)
        return {name: (tuple(data.shape), data.dtype) for name, data in pairs}
    if instance.indices is not None:
        return {"indices": (tuple(instance.indices.shape), None)}
    if case.is_attention:
        rows, heads, dtype = sum(case.query_lens), case.num_q_heads, instance.buffers["q"].view.dtype
        return {"out": ((rows, heads, case.v_head_dim), dtype), "lse": ((rows, heads), torch.float32)}
    if case.operation is Operation.LSE_MERGE:
        rows, heads = sum(case.context_lens), case.num_kv_heads
        return {"out": ((rows, heads, case.v_head_dim), None), "lse": ((rows, heads), torch.float32)}
    return {}
