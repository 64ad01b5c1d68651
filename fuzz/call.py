"""Call a target on an instance: its own convention in, named outputs out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz.instance import Instance
from oracle.convention import DefaultScale, WindowMeaning
from oracle.declare import Declaration
from oracle.kinds import Operation


class Unsupported(Exception):
    """Raised by an adapter for what its target declares not to do here. The message is the reason."""


class ResultError(Exception):
    """The target returned something else than its operation returns."""


def arguments(declaration: Declaration, instance: Instance) -> dict[str, Any]:
    """Arguments for ``declaration.function``, in the target's convention."""
    case, convention = instance.case, declaration.convention
    given: dict[str, Any] = {name: buffer.view for name, buffer in instance.buffers.items()}
    if case.operation is Operation.KV_WRITE:
        given.setdefault("slot_map", None)
    elif case.operation is Operation.VARLEN_EXTEND:
        required = convention.default_scale is DefaultScale.REQUIRED
        scale = instance.problem.scale if required and instance.problem is not None else case.scale
        given |= {"causal": case.causal, "scale": scale, "soft_cap": case.soft_cap}
        given |= {"q_descale": None, "k_descale": None, "v_descale": None}
        given.setdefault("sinks", None)
        if convention.window.meaning is WindowMeaning.UNSUPPORTED:
            given["window"] = None
        else:
            given["window"] = convention.window.argument(case.window)
    return given


def call(declaration: Declaration, instance: Instance) -> dict[str, Tensor]:
    """Run the target once.

    Returns its outputs by name: none for kv_write (the caches are written in place), ``key`` and ``value``
    for kv_gather, ``out`` and perhaps ``lse`` for attention. Raises ``ResultError`` for any other result.
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
            wanted = f"{dtype or 'a float dtype'} {list(shape)}"
            raise ResultError(f"{name}: {value.dtype} {list(value.shape)}; expected {wanted}")
    return outputs


def _output_names(operation: Operation, result: object) -> tuple[str, ...]:
    allowed = {
        Operation.KV_WRITE: ((),),
        Operation.KV_GATHER: (("key", "value"),),
        Operation.VARLEN_EXTEND: (("out",), ("out", "lse")),
    }[operation]
    values = result if isinstance(result, tuple) else () if result is None else (result,)
    for names in allowed:
        if len(names) == len(values) and all(isinstance(v, Tensor) for v in values):
            return names
    wanted = " or ".join("(" + ", ".join(names) + ")" if names else "None" for names in allowed)
    got = ", ".join(type(v).__name__ for v in values) or "None"
    raise ResultError(f"returned ({got}); expected {wanted}")


def expected_outputs(instance: Instance) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of each output; dtype None: any."""
    case = instance.case
    if case.operation is Operation.KV_GATHER:
        pairs = zip(("key", "value"), instance.linear.values(), strict=True)
        return {name: (tuple(data.shape), data.dtype) for name, data in pairs}
    if case.operation is Operation.VARLEN_EXTEND:
        tokens = sum(case.query_lens)
        out_dtype = instance.buffers["q"].view.dtype
        return {
            "out": ((tokens, case.num_q_heads, case.v_head_dim), out_dtype),
            "lse": ((tokens, case.num_q_heads), torch.float32),
        }
    return {}
