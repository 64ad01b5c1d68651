"""Names that every room shares. Needs no torch: declarations of targets import it."""

from enum import StrEnum


class KVLayout(StrEnum):
    """Order of a KV cache's axes; `oracle.layout` holds the shapes and formulas."""

    LINEAR = "linear"
    NHD = "nhd"
    HND = "hnd"
    SHUFFLE_5D = "shuffle_5d"


class VLayout(StrEnum):
    """Form of the V cache under `KVLayout.SHUFFLE_5D`; the other layouts have one form for K and V."""

    V5D = "5d"
    V4D = "4d"


class Role(StrEnum):
    """Which half of a KV cache a tensor is."""

    K = "k"
    V = "v"


class IndexForm(StrEnum):
    """How a call names its keys: a 2-D table of pages, or a flat list of one slot per token."""

    PAGE_TABLE = "page_table"
    SLOT_LIST = "slot_list"


class LseBase(StrEnum):
    """Base of the logarithm in a log-sum-exp: e or 2."""

    NATURAL = "natural"
    TWO = "two"


class Operation(StrEnum):
    """What a target claims to compute."""

    PAGED_DECODE = "paged_decode"
    VARLEN_EXTEND = "varlen_extend"
    KV_WRITE = "kv_write"
    KV_GATHER = "kv_gather"
    LSE_MERGE = "lse_merge"
    INDEX_BUILD = "index_build"
    BACKEND = "backend"


class IndexTask(StrEnum):
    """What an ``index_build`` target computes, for decode context parallel."""

    NONE = "none"
    RANK_SLOTS = "rank_slots"
    """the physical rows of the positions that one rank owns, from the table of widened slots"""
    GATHERED = "gathered"
    """where prefix and new tokens of each request lie in a buffer gathered from all ranks"""
    LOCAL = "local"
    """one rank's share of a flat list of widened slots"""


class Engine(StrEnum):
    """Where a kernel executes. One process runs one engine."""

    CUDA = "cuda"
    HIP = "hip"
    EMULATOR = "emulator"
