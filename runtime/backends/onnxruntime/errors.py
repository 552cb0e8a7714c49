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
