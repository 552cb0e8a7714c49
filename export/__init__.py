"""Export: two Hugging Face checkpoints become one bundle that the runtime can run on two devices.

The names below load PyTorch on first use; `ExportOptions` does not.
"""

from importlib import import_module, util
from typing import TYPE_CHECKING

from mirrorsd.export.options import ExportOptions, ExportProgress
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd.export.pair import export_pair

__all__ = ["ExportOptions", "ExportProgress", "export_pair"]

_NEEDED = ("torch", "transformers", "onnx_ir", "onnxscript", "safetensors", "openvino", "onnxruntime")


def __getattr__(name: str) -> object:
    """Load `export_pair` on first use, with one sentence where something is not installed."""
    if name != "export_pair":
        raise AttributeError(f"module 'mirrorsd.export' has no attribute {name!r}")
    missing = [package for package in _NEEDED if util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"exporting needs {', '.join(missing)}: pip install 'mirrorsd[cpu,export]'")
    return import_module("mirrorsd.export.pair").export_pair
