"""What each ONNX Runtime provider wants: session options, and the provider's own."""

import onnxruntime as ort

from mirrorsd.device_maps import TargetPlacement


def session_options(placement: TargetPlacement) -> ort.SessionOptions:
    """Threads, placement without a silent fall-back, and what the provider needs besides."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = placement.threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    if placement.threads > 1:
        # Each stage has a pool of its own: an idle one must not spin beside the one at work.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if len(placement.cores) == placement.threads:
            pool = ";".join(str(core + 1) for core in placement.cores[1:])
            options.add_session_config_entry("session.intra_op_thread_affinities", pool)
    if placement.provider == "DmlExecutionProvider":
        # ONNX Runtime's page on DirectML: neither memory patterns nor parallel execution.
        options.enable_mem_pattern = False
    # So that the session can say afterwards which node runs where.
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if placement.provider != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options


def provider_options(
    placement: TargetPlacement, *, dtype: str = "float32", captures: bool = False, stream: int | None = None
) -> dict[str, str]:
    """The provider's own options, as ONNX Runtime's page on each of them names them.

    Args:
        placement: The card's target.
        dtype: What the stages compute in.
        captures: Whether passes are captured as CUDA graphs.
        stream: A CUDA stream that the caller owns, as a number; None for the provider's own.
    """
    if placement.provider == "CUDAExecutionProvider":
        return _cuda_options(placement, dtype) | _shared_cuda_options(captures, stream)
    if placement.provider == "NvTensorRTRTXExecutionProvider":
        return {"device_id": str(placement.device_id)} | _shared_cuda_options(captures, stream)
    if placement.provider == "DmlExecutionProvider":
        return {"device_id": str(placement.device_id)}
    return {}


def _cuda_options(placement: TargetPlacement, dtype: str) -> dict[str, str]:
    options = {"device_id": str(placement.device_id)}
    # Ask the driver for what is needed, no powers of two: weights and caches are allocated once.
    options["arena_extend_strategy"] = "kSameAsRequested"
    if dtype == "float32":
        # TF32 keeps ten bits of a product: what was verified in float32 is to stay float32.
        options["use_tf32"] = "0"
    return options


def _shared_cuda_options(captures: bool, stream: int | None) -> dict[str, str]:
    options = {"enable_cuda_graph": "1"} if captures else {}
    if stream is not None:
        options |= {"has_user_compute_stream": "1", "user_compute_stream": str(stream)}
    return options
