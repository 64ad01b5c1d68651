"""Mutants of sglang 0.5.15: kernels and host code as they were loaded, found by syntax alone."""

from __future__ import annotations

from functools import partial

from suites.museum.entry import BugClass, Entry, Room
from suites.museum.mutation import Place, Structure

CACHE = partial(
    Place,
    file="sglang/srt/layers/attention/utils.py",
    sha256="bc08d22bd8812e9c212ff7798ea5e2f526d1aeda1aa34bd3f857c7a152081e79",
)
DCP = partial(
    Place,
    file="sglang/srt/layers/dcp/kernels.py",
    sha256="aa1c025225f55923e8a2effaa9da51444f4d3408d3f546d38ee8c22e1a25fad3",
)
COMM = partial(
    Place,
    file="sglang/srt/layers/dcp/comm.py",
    sha256="663810ba2ae401d5002ac5e4f83474f90ad1ead2a19a69c1b85a65d9e69d7d99",
)
DECODE = partial(
    Place,
    file="sglang/srt/layers/attention/triton_ops/decode_attention.py",
    sha256="4ecf5d81f06fcc8aa36479541ff3857a1416e2d8def2c5fa818808148febaa75",
)
STATE = partial(
    Place,
    file="sglang/srt/layers/attention/triton_ops/merge_state.py",
    sha256="bfd9c3d356b97939e4c19c4cc0446daeb45f0b9aece86c6460ea44ae400f7182",
)
STEP = partial(
    Place,
    file="sglang/srt/layers/attention/aiter_utils.py",
    sha256="1a9f95b5e79e3037e791af8947f32ab5a233e64f63b08fe887c47fa790e09f32",
)
WRITER, GATHER = "reshape_and_cache_shuffle_5d", "gather_shuffle_5d_to_linear"

ENTRIES = (
    Entry(
        id="B162",
        reference="ROCm/aiter#5292",
        kind=BugClass.LAYOUT,
        room=Room.WRITE,
        sentence="Of several strided inputs only some had their strides passed on.",
        mutated="the launcher of the writer passes the keys' stride for the values",
        target="sglang.shuffle_5d.write",
        mutation=Structure(
            CACHE(function=f"launch_{WRITER}"), ("call stride#1", "name value"), "key"
        ),
    ),
    Entry(
        id="B147",
        reference="alibaba/rtp-llm#1240",
        kind=BugClass.LAYOUT,
        room=Room.WRITE,
        sentence="Values were written in one order of the cache and read in the other.",
        mutated="the writer stores values of a page dimension by dimension, not in vectors",
        target="sglang.shuffle_5d.write",
        mutation=Structure(
            CACHE(function=WRITER),
            ("assign v_tgt",),
            "v_tgt = block_idx * layer_stride + head_idx[:, None] * head_stride + slot_in_page * head_size + d[None, :]",
        ),
    ),
    Entry(
        id="B132",
        reference="vllm-project/vllm#47056",
        kind=BugClass.INDEX_LOGIC,
        room=Room.WRITE,
        sentence="A slot was taken apart by the size of a stored vector instead of the size of a page.",
        mutated="the writer's page is the slot divided by the width of a vector",
        target="sglang.shuffle_5d.write",
        mutation=Structure(CACHE(function=WRITER), ("assign block_idx", "binop //"), "{0} // X"),
    ),
    Entry(
        id="B215",
        reference="m0at/rvllm#32",
        kind=BugClass.STALE,
        room=Room.WRITE,
        sentence="Padding rows were written to slot 0, where a live token lay.",
        mutated="a token that has no slot gets slot 0",
        target="sglang.shuffle_5d.write",
        mutation=Structure(CACHE(function=WRITER), ("if #1", "return"), "slot_idx = slot_idx * 0"),
    ),
    Entry(
        id="B242",
        reference="vllm-project/vllm-ascend#16775",
        kind=BugClass.DTYPE,
        room=Room.WRITE,
        sentence="Slots of 64 bits were read as if they had 32.",
        mutated="the launcher reinterprets the list of slots as int32",
        target="sglang.shuffle_5d.write",
        mutation=Structure(
            CACHE(function=f"launch_{WRITER}"), ("name slot_mapping#0",), "{self}.view(torch.int32)"
        ),
    ),
    Entry(
        id="B154",
        reference="vllm-project/vllm#49012",
        kind=BugClass.LAYOUT,
        room=Room.WRITE,
        sentence="The size of a page was taken from the axis of the heads.",
        mutated="the launcher of the writer passes heads and page size the wrong way round",
        target="sglang.shuffle_5d.write",
        mutation=Structure(
            CACHE(function=f"launch_{WRITER}"), (f"call {WRITER}", "argument 10"), "num_heads"
        ),
    ),
    Entry(
        id="B152",
        reference="vllm-project/vllm#29887",
        kind=BugClass.LAYOUT,
        room=Room.GATHER,
        sentence="The gather stored every head at the place of the first.",
        mutated="no head in the offset of the gathered keys",
        target="sglang.shuffle_5d.gather",
        mutation=Structure(CACHE(function=GATHER), ("assign dst_k", "name head_idx"), "(head_idx * 0)"),
    ),
    Entry(
        id="B144",
        reference="vllm-project/vllm#33759",
        kind=BugClass.LAYOUT,
        room=Room.GATHER,
        sentence="A gather for windowed layers read tokens outermost from a cache that is shuffled.",
        mutated="the gather reads keys token by token",
        target="sglang.shuffle_5d.gather",
        mutation=Structure(
            CACHE(function=GATHER),
            ("assign k_src",),
            "k_src = slot_idx * num_heads * head_size + head_idx[:, None] * head_size + d[None, :]",
        ),
    ),
    Entry(
        id="B180",
        reference="local-inference-lab/vllm#14",
        kind=BugClass.DTYPE,
        room=Room.GATHER,
        sentence="The gather wanted one dtype everywhere, which a cache of fp8 is not.",
        mutated="gathered values are allocated as bf16",
        target="sglang.shuffle_5d.gather",
        mutation=Structure(
            CACHE(function=f"launch_{GATHER}"), ("assign value_out", "call empty", "argument dtype"), "torch.bfloat16"
        ),
    ),
    Entry(
        id="B110",
        reference="lightseekorg/tokenspeed#501",
        kind=BugClass.OVERFLOW,
        room=Room.GATHER,
        sentence="A slot times its stride was computed in 32 bits.",
        mutated="the gather casts slots to int32",
        target="sglang.shuffle_5d.gather",
        mutation=Structure(CACHE(function=GATHER), ("assign slot_idx", "call load"), "{self}.to(tl.int32)"),
        huge=True,
    ),
    Entry(
        id="B240",
        reference="sgl-project/sglang#39330",
        kind=BugClass.INDEX_LOGIC,
        room=Room.INDEX,
        sentence="Slots of the widened space were used as rows of the rank's own pool.",
        mutated="a rank lists slots without dividing them by the number of ranks",
        target="sglang.dcp.kv_indices",
        mutation=Structure(
            DCP(function="create_triton_kv_indices_for_dcp_triton"), ("call store", "binop //"), "{0}"
        ),
    ),
    Entry(
        id="B241",
        reference="ROCm/ATOM#2087",
        kind=BugClass.DISPATCH,
        room=Room.INDEX,
        sentence="The interleaving of ranks did not reach the kernel, which went on as if there were none.",
        mutated="a rank takes neighbouring tokens instead of every n-th",
        target="sglang.dcp.local_indices",
        mutation=Structure(
            DCP(function="update_kv_lens_and_indices"), ("assign kv_indice_offsets", "binop *"), "{0}"
        ),
    ),
    Entry(
        id="B137",
        reference="pytorch/xla#8431",
        kind=BugClass.INDEX_LOGIC,
        room=Room.INDEX,
        sentence="The number of blocks was wrong where the length is or is not an exact multiple of their size.",
        mutated="the number of blocks of a prefix is rounded down",
        target="sglang.dcp.gathered_indices",
        mutation=Structure(
            DCP(function="create_dcp_kv_indices"), ("assign num_loop#0", "call cdiv"), "({0} // {1})"
        ),
    ),
    Entry(
        id="B121",
        reference="vllm-project/vllm#51848",
        kind=BugClass.OUT_OF_BOUNDS,
        room=Room.INDEX,
        sentence="A table with a row for each request was read by another number, beyond its end.",
        mutated="the row of the table is the start of the request's list",
        target="sglang.dcp.kv_indices",
        mutation=Structure(
            DCP(function="create_triton_kv_indices_for_dcp_triton"),
            ("assign data", "name req_pool_index"),
            "kv_indices_offset",
        ),
    ),
    Entry(
        id="B045",
        reference="vllm-project/vllm#28840",
        kind=BugClass.LSE_MERGE,
        room=Room.MERGE,
        sentence="The correction of ranks' outputs took log-sum-exps of base 2 for natural ones.",
        mutated="weights by exp instead of exp2",
        target="sglang.dcp.correct_attn_out",
        mutation=Structure(DCP(function="_correct_attn_cp_out_kernel"), ("assign lse_exp", "call exp2"), "tl.exp({0})"),
    ),
    Entry(
        id="B051",
        reference="vllm-project/vllm#28181",
        kind=BugClass.NAN,
        room=Room.MERGE,
        sentence="A merge failed where every part is empty.",
        mutated="no guard for a largest log-sum-exp of minus infinity",
        target="sglang.dcp.correct_attn_out",
        mutation=Structure(
            DCP(function="_correct_attn_cp_out_kernel"), ("assign lse_max#1", "call where"), "{2}"
        ),
    ),
    Entry(
        id="B047",
        reference="sgl-project/sglang#33926",
        kind=BugClass.LSE_MERGE,
        room=Room.MERGE,
        sentence="Two places disagreed on the base of a log-sum-exp, which was converted twice.",
        mutated="gathered log-sum-exps are converted to base 2 once more",
        target="sglang.dcp.comm.all_reduce",
        mutation=Structure(COMM(function="cp_lse_ag_out_rs_mha"), ("assign lses", "call _ag_lse"), "{self} * 1.4426950408889634"),
    ),
    Entry(
        id="B238",
        reference="sgl-project/sglang#34355",
        kind=BugClass.SUPPORT,
        room=Room.HOST,
        sentence="With several heads to a rank each took the wrong share of them.",
        mutated="a rank's share of the heads begins at its number",
        target="sglang.dcp.comm.all_reduce",
        mutation=Structure(COMM(function="cp_lse_ag_out_rs_mha"), ("assign head_start", "binop *"), "{1}"),
    ),
    Entry(
        id="B055",
        reference="vllm-project/vllm#21996",
        kind=BugClass.LAYOUT,
        room=Room.MERGE,
        sentence="A merge took log-sum-exps of one layout for those of another.",
        mutated="the prefix's log-sum-exps are read with heads outermost",
        target="sglang.merge_state",
        mutation=Structure(
            STATE(function="merge_state_kernel"),
            ("assign p_lse#0", "call load"),
            "tl.load(prefix_lse + head_idx * num_tokens + token_idx)",
        ),
    ),
    Entry(
        id="B054",
        reference="ROCm/aiter#3267",
        kind=BugClass.LSE_MERGE,
        room=Room.DECODE,
        sentence="Log-sum-exps of more than 16 heads were stored over those of the first 16.",
        mutated="a split's log-sum-exp is stored for the head's number modulo 16",
        target="sglang.triton.decode_grouped",
        mutation=Structure(
            DECODE(function="_fwd_grouped_kernel_stage1"), ("assign offs_mid_o_1", "name cur_head"), "(cur_head % 16)"
        ),
    ),
    Entry(
        id="B188",
        reference="NVIDIA/TensorRT-LLM#6573",
        kind=BugClass.SUPPORT,
        room=Room.DECODE,
        sentence="Of more than eight query heads to a key head only eight were right.",
        mutated="a split stores the first eight heads of its block",
        target="sglang.triton.decode_grouped",
        mutation=Structure(
            DECODE(function="_fwd_grouped_kernel_stage1"),
            ("call store#0", "argument mask", "name mask_h"),
            "(mask_h & (tl.arange(0, BLOCK_H) < 8))",
        ),
    ),
    Entry(
        id="B035",
        reference="kekzl/imp#1303",
        kind=BugClass.SINK,
        room=Room.MERGE,
        sentence="The sink's term could be deleted from the reducer without any test noticing.",
        mutated="it is deleted",
        target="sglang.triton.decode",
        mutation=Structure(DECODE(function="_fwd_kernel_stage2"), ("assign e_sum#2",), "e_sum += 0.0"),
    ),
    Entry(
        id="B064",
        reference="meta-pytorch/segment-anything-fast#71",
        kind=BugClass.SCALING,
        room=Room.DECODE,
        sentence="In a kernel that computes powers of two a term was not converted from natural units.",
        mutated="the weights of one step are powers of two",
        target="sglang.triton.decode",
        mutation=Structure(DECODE(function="_fwd_kernel_stage1"), ("assign p", "call exp"), "tl.exp2({0})"),
    ),
    Entry(
        id="B090",
        reference="thu-ml/SageAttention#377",
        kind=BugClass.UNINITIALISED,
        room=Room.DECODE,
        sentence="A predicated load without a value for the lanes left out kept what was there before.",
        mutated="values are loaded without one for masked lanes",
        target="sglang.triton.decode",
        mutation=Structure(DECODE(function="_fwd_kernel_stage1"), ("assign v", "call load", "argument other"), "None"),
    ),
    Entry(
        id="B011",
        reference="sgl-project/sglang#38756",
        kind=BugClass.MASKING,
        room=Room.HOST,
        sentence="A windowed layer was sent to the path of the full ones.",
        mutated="prefill of a windowed layer after a prefix lists the full pool's slots",
        target="sglang.backend.extend_5d",
        mutation=Structure(
            STEP(function="forward_extend_vectorized_5d"),
            ("assign slot_ids#0",),
            "slot_ids = backend.forward_metadata.kv_indices[:total_kv]",
        ),
    ),
    Entry(
        id="B040",
        reference="PrimeIntellect-ai/prime-rl#3397",
        kind=BugClass.SINK,
        room=Room.HOST,
        sentence="On one of the paths the sinks disappeared among the other arguments.",
        mutated="prefill after a prefix passes no sinks on",
        target="sglang.backend.extend_5d",
        mutation=Structure(
            STEP(function="forward_extend_vectorized_5d"),
            ("call mha_batch_prefill_func#1", "argument sink_ptr"),
            "None",
        ),
    ),
    Entry(
        id="B171",
        reference="flashinfer-ai/flashinfer#1023",
        kind=BugClass.DISPATCH,
        room=Room.HOST,
        sentence="Scales of keys and values went to the wrong arguments.",
        mutated="the step passes the keys' scale for the values too",
        target="sglang.backend.decode_5d.fp8",
        mutation=Structure(
            STEP(function="forward_decode_vectorized_5d"),
            ("call pa_decode_gluon", "argument value_scale"),
            "key_scale",
        ),
    ),
)
