"""What each ONNX Runtime provider wants (session options, and the provider's own), and what ONNX Runtime raises."""

import functools

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.onnx_bytes import ONNX_TYPES, model, node
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import errors_of

ONNX_ERRORS = errors_of(onnxruntime_state)
"""Everything that ONNX Runtime raises; most of its classes derive from `Exception` alone."""
FILE_ERRORS = (
    onnxruntime_state.InvalidProtobuf,
    onnxruntime_state.NoSuchFile,
    onnxruntime_state.NoModel,
    onnxruntime_state.InvalidGraph,
)
"""Those that say that a file is not the graph that the exporter wrote."""
_LOST = ("device] is lost", "device is lost", "device lost", "887a0005", "887a0006", "887a0007", "device removed")
"""WebGPU's words and DirectX's numbers (removed, hung, reset), in small letters."""
_WITHOUT_PATTERNS = ("CPUExecutionProvider", "DmlExecutionProvider")
_OPENS_EXACT_INTEGERS = (1, 30)
"""The version since which ONNX Runtime opens our products of integers as `names.EXACT_INTEGERS` asks for. Earlier ones
end the process there, on a processor without VNNI: 1.24 to 1.29 were installed one after the other, and
`pytest tests/unit/export/passes/test_integer_products.py` run."""


def session_options(placement: TargetPlacement) -> ort.SessionOptions:
    """Threads, placement without a silent fall-back, and what the provider needs besides."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = placement.threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    ask_for_exact_integers(options)
    # An arena keeps what loading needed for a moment: a head's weights as they are in the file, beside the packed ones.
    options.enable_cpu_mem_arena = False
    # A pattern of memory is kept for every combination of inputs' sizes, for good: a server of many conversations meets
    # new ones for hours, and its heap grows (`python bench/claims/soak.py`). DirectML asks for none, either.
    options.enable_mem_pattern = placement.provider not in _WITHOUT_PATTERNS
    if placement.threads > 1:
        # Each stage has a pool of its own: an idle one must not spin beside the one at work.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if len(placement.cores) == placement.threads:
            pool = ";".join(str(core + 1) for core in placement.cores[1:])
            options.add_session_config_entry("session.intra_op_thread_affinities", pool)
    # So that the session can say afterwards which node runs where.
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if placement.provider != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options


def ask_for_exact_integers(options: ort.SessionOptions) -> None:
    """Ask for it where sums are cut off otherwise and asking ends no process.

    What else is lost, `device_memory.integers_are_exact` finds out.
    """
    is_taken = tuple(int(part) for part in ort.__version__.split(".")[:2]) >= _OPENS_EXACT_INTEGERS
    if is_taken and not sums_are_exact():
        options.add_session_config_entry(*names.EXACT_INTEGERS)


@functools.cache
def sums_are_exact() -> bool:
    """Whether this processor adds up products of 8-bit integers without being asked for precision.

    Processors with VNNI do, and those of ARM. Asked for, ONNX Runtime (1.31) would leave their kernels for signed
    weights alone: two layers' products of Qwen2.5-Coder-1.5B on one core of a Xeon with AMX take 8.6 and 8.5 ms for 1
    and 8 rows without, 9.4 and 15.5 with (`bench/studies/weights/asked_precision.py`).
    """
    return adds_exactly(ort.SessionOptions(), "CPUExecutionProvider", {})


def adds_exactly(options: ort.SessionOptions, provider: str, settings: dict[str, str]) -> bool:
    """Whether a session opened like that adds the largest 8-bit products, of one row and of many, without loss."""
    product = node("MatMulInteger", ["rows", "weight"], ["out"])
    ports = [("rows", ONNX_TYPES["uint8"], 2)], [("out", ONNX_TYPES["int32"], 2)]
    graph = model([product], *ports, {"weight": np.full((64, 32), 127, np.int8)})
    session = ort.InferenceSession(graph, options, providers=[(provider, settings)], enable_fallback=0)
    found = [session.run(None, {"rows": np.full((rows, 64), 255, np.uint8)})[0] for rows in (1, 2, 64)]
    return all(bool((sums == 255 * 127 * 64).all()) for sums in found)


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
        return _number(placement) | _shared_cuda_options(captures, stream)
    if placement.provider == "DmlExecutionProvider":
        return _number(placement)
    return {}


def _cuda_options(placement: TargetPlacement, dtype: str) -> dict[str, str]:
    options = _number(placement)
    # Ask the driver for what is needed, no powers of two: weights and caches are allocated once.
    options["arena_extend_strategy"] = "kSameAsRequested"
    if dtype == "float32":
        # TF32 keeps ten bits of a product: what was verified in float32 is to stay float32.
        options["use_tf32"] = "0"
    return options


def _number(placement: TargetPlacement) -> dict[str, str]:
    """Which of several devices, where that is not the first: a number that is said brings a warning for each stage."""
    return {"device_id": str(placement.device_id)} if placement.device_id else {}


def _shared_cuda_options(captures: bool, stream: int | None) -> dict[str, str]:
    options = {"enable_cuda_graph": "1"} if captures else {}
    if stream is not None:
        options |= {"has_user_compute_stream": "1", "user_compute_stream": str(stream)}
    return options


def why_failed(error: Exception) -> str:
    """The vendor's words; where they say that the device is gone, what that means comes first.

    >>> why_failed(RuntimeError("Failed to download data from buffer: [Device] is lost."))[:67]
    'the device was lost: its driver was restarted, or it was unplugged.'
    """
    words = str(error).strip()
    if not any(sign in words.lower() for sign in _LOST):
        return words
    return f"the device was lost: its driver was restarted, or it was unplugged. Start the program again. ({words})"
