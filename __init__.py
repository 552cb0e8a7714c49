"""Mirror speculative decoding for ordinary PCs: export a pair of language models, run it on two devices."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mirrorsd.graphs.errors import (
        BundleError,
        Cancelled,
        ConfigError,
        ContextLengthError,
        ContinuationError,
        DeviceError,
        ExportError,
        GenerationError,
        MirrorError,
        ParityError,
    )
    from mirrorsd.machine.tuning.kept import tune
    from mirrorsd.runtime import CancelToken, Chunk, GenerationConfig, GenerationResult, MirrorPipeline, MirrorSession
    from mirrorsd.texts.config import SpeculationConfig

__version__ = "0.1.0"
__all__ = [
    "BundleError",
    "CancelToken",
    "Cancelled",
    "Chunk",
    "ConfigError",
    "ContextLengthError",
    "ContinuationError",
    "DeviceError",
    "ExportError",
    "GenerationConfig",
    "GenerationError",
    "GenerationResult",
    "MirrorError",
    "MirrorPipeline",
    "MirrorSession",
    "ParityError",
    "SpeculationConfig",
    "__version__",
    "tune",
]
# Nothing is reported to makers: OpenVINO and NNCF do without this package, ONNX Runtime (1.29 and later) reads this.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


def _loaded(name: str) -> object:
    """Load the public names on first use, so that ``import mirrorsd`` stays fast."""
    if name not in __all__:
        raise AttributeError(f"module 'mirrorsd' has no attribute {name!r}")
    is_error = name == "Cancelled" or name.endswith("Error")
    home = "graphs.errors" if is_error else "machine.tuning.kept" if name == "tune" else "runtime"
    return getattr(import_module(f"mirrorsd.{home}"), name)


if not TYPE_CHECKING:  # checkers know the names above, and refuse any other
    __getattr__ = _loaded


def __dir__() -> list[str]:
    """Every public name, loaded or not."""
    return sorted({*globals(), *__all__})
