"""onnxruntime's GroupQueryAttention on the CPU, one request at a time."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor


@cache
def session(heads: int, kv_heads: int, dim: int, window: int, soft_cap: float, scale: float) -> object:
    """A model of one operator. window: keys that a query sees, its own counted; -1: all. soft_cap, scale: 0: none."""

    def tensor(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> object:
        return helper.make_tensor_value_info(name, kind, shape)

    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v", "last", "total"],
        ["out", "all_k", "all_v"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
        local_window_size=window,
        softcap=soft_cap,
        scale=scale,
    )
    inputs = [
        tensor("q", 1, "S", heads * dim),
        tensor("k", 1, "S", kv_heads * dim),
        tensor("v", 1, "S", kv_heads * dim),
        tensor("past_k", 1, kv_heads, "P", dim),
        tensor("past_v", 1, kv_heads, "P", dim),
        tensor("last", 1, kind=TensorProto.INT32),
        tensor("total", kind=TensorProto.INT32),
    ]
    outputs = [tensor("out", 1, "S", heads * dim)]
    outputs += [tensor(name, 1, kv_heads, "L", dim) for name in ("all_k", "all_v")]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int = -1, soft_cap: float | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention of the last S positions of one request. q and the result [S, Hq, D]; k and v [L, Hkv, D]."""
    past, (queries, heads, dim) = k.shape[0] - q.shape[0], q.shape
    run = session(heads, k.shape[1], dim, window, soft_cap or 0.0, scale or 0.0).run
    new = {"q": q, "k": k[past:], "v": v[past:]}
    old = {"past_k": k[:past], "past_v": v[:past]}
    given = {name: x.reshape(1, queries, -1).numpy() for name, x in new.items()}
    given |= {name: x.transpose(0, 1).contiguous().unsqueeze(0).numpy() for name, x in old.items()}
    given |= {"last": np.array([k.shape[0] - 1], np.int32), "total": np.array(k.shape[0], np.int32)}
    return torch.from_numpy(run(["out"], given)[0]).view(queries, heads, dim)
