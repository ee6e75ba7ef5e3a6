"""The tests of torch's that our class is expected to fail, each with the reason.

Strict: a test of this table that passes fails the suite, so the table only shrinks. A reason is either
"not built yet: FEATURE", or what we do in its place and why.
"""

from __future__ import annotations

_MIXED = "not built yet: mixed precision (`_mp_param`, casts)"
_LOGGING = "not built yet: what _get_ddp_logging_data says"
_REDUCER = "reads torch's C++ reducer, which we do not have; the answer is in ddp.contract and ddp.last_step"
_UNUSED = (
    "to decide: unused parameters are an error at this backward; torch's is one forward later, with its words"
)

EXPECTED: dict[str, str] = {
    "test_ddp_broadcast_buffers_deprecation_warning": "not built yet: the warning that broadcast_buffers is deprecated",
    "test_ddp_comm_hook_logging": _LOGGING,
    "test_ddp_control_flow_different_across_ranks": _REDUCER,
    "test_ddp_control_flow_same_across_ranks": _REDUCER,
    "test_ddp_create_graph": "to decide: backward(create_graph=True) is refused, torch warns",
    "test_ddp_hook_parity_powerSGD": "not built yet: PowerSGD as comm hook (the ranks wait for each other)",
    "test_ddp_logging_data_cpu": _LOGGING,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _UNUSED,
    "test_ddp_multiple_nested_unused_params_error": _UNUSED,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_native_mixed_precision_ignored_params": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_profiling_torch_profiler": "not built yet: torch's profiler ranges of the wrapper",
    "test_ddp_python_error_logged": _LOGGING,
    "test_ddp_uneven_inputs": "not built yet: join in all its combinations (ranks wait for each other)",
    "test_ddp_unused_params_rebuild_buckets_exception": _UNUSED,
    "test_detect_ddp_is_actually_static": _REDUCER,
    "test_different_graph_across_ranks": _LOGGING,
    "test_invalid_static_graph": "not built yet: an error when a static graph changes",
    "test_skip_all_reduce_unused_parameters": "not built yet: skip_all_reduce_unused_params",
    "test_static_graph_api_cpu": _LOGGING,
    "test_undefined_grad_parity_unused_parameters": "not built yet: an undefined gradient leaves .grad None",
}
