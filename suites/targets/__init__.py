"""Adapters: the kernels under test, each declared with its convention, precision and capabilities."""

MODULES = (
    "suites.targets.sglang_shuffle_5d",
    "suites.targets.sglang_dcp",
    "suites.targets.sglang_dcp_comm",
    "suites.targets.sglang_dcp_combine",
    "suites.targets.sglang_dcp_write",
    "suites.targets.sglang_dcp_decode",
    "suites.targets.sglang_dcp_extend",
    "suites.targets.sglang_merge_state",
    "suites.targets.sglang_merge_splits",
    "suites.targets.sglang_merge_flashinfer",
    "suites.targets.sglang_attention",
    "suites.targets.torch_native",
    "suites.targets.aiter_unified",
    "suites.targets.aiter_pa_decode",
    "suites.targets.tokenspeed_mha",
    "suites.targets.portable.targets",
    "suites.targets.portable.merge",
    "suites.targets.aiter_prefill",
    "suites.targets.sglang_backend.targets",
)
"""Every module that declares targets. Importing one costs nothing of the kernels' own packages."""
