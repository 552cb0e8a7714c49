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
    if placement.provider != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options


def provider_options(placement: TargetPlacement) -> dict[str, str]:
    """The provider's own options, as ONNX Runtime's page on each of them names them."""
    if placement.provider in ("CUDAExecutionProvider", "DmlExecutionProvider"):
        return {"device_id": str(placement.device_id)}
    if placement.provider == "QNNExecutionProvider":
        return {"backend_type": "htp"}
    if placement.provider == "CoreMLExecutionProvider":
        return {"ModelFormat": "MLProgram", "MLComputeUnits": "ALL"}
    return {}
