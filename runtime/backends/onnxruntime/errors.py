"""Everything that ONNX Runtime raises; most of its classes derive from `Exception` alone."""

from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state

from mirrorsd.graphs.errors import errors_of

ONNX_ERRORS = errors_of(onnxruntime_state)
FILE_ERRORS = (
    onnxruntime_state.InvalidProtobuf,
    onnxruntime_state.NoSuchFile,
    onnxruntime_state.NoModel,
    onnxruntime_state.InvalidGraph,
)
"""Those that say that a file is not the graph that the exporter wrote."""
_LOST = ("device] is lost", "device is lost", "device lost", "887a0005", "887a0006", "887a0007", "device removed")
"""WebGPU's words and DirectX's numbers (removed, hung, reset), in small letters."""


def why_failed(error: Exception) -> str:
    """The vendor's words; where they say that the device is gone, what that means comes first.

    >>> why_failed(RuntimeError("Failed to download data from buffer: [Device] is lost."))[:67]
    'the device was lost: its driver was restarted, or it was unplugged.'
    """
    words = str(error).strip()
    if not any(sign in words.lower() for sign in _LOST):
        return words
    return f"the device was lost: its driver was restarted, or it was unplugged. Start the program again. ({words})"
