"""The one place that turns an error into an exit status and into words about what the user typed.

0 done, 1 another generation error, a package or a file that fails, or a comparison that found a difference, 2 usage,
3 bad bundle or checkpoint, 4 device not available, 130 cancelled.
"""

import errno
import re

from mirrorsd.graphs.errors import (
    BundleError,
    Cancelled,
    ConfigError,
    ContextLengthError,
    DeviceError,
    ExportError,
    MirrorError,
)

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BAD_MODEL = 3
EXIT_NO_DEVICE = 4
EXIT_CANCELLED = 130

_CODES: tuple[tuple[type[MirrorError], int], ...] = (
    (ConfigError, EXIT_USAGE),
    (ContextLengthError, EXIT_USAGE),
    (BundleError, EXIT_BAD_MODEL),
    (ExportError, EXIT_BAD_MODEL),
    (DeviceError, EXIT_NO_DEVICE),
    (Cancelled, EXIT_CANCELLED),
)
_OWNERS = (
    *("GenerationConfig", "SpeculationConfig", "ExportOptions", "DraftCompression"),
    *("DistillConfig", "RunConfig", "WarmStableDecay", "DraftPlan", "StreamShape", "ExitAdapter", "SelfTextConfig"),
    *("HeadPlan", "HeadTrainingConfig", "ServerSettings"),
)
_FIELD = re.compile(rf"\b({'|'.join(_OWNERS)})\.(\w+)")
_OTHER_NAMES = {  # by the field's name, or by its owner's too where two have one of that name
    "stop_strings": "--stop",
    "do_sample": "--temperature",
    "rate": "--rate",
    "calibration_text": "--calibration",
    "budget_s": "--seconds",
    "decay_s": "--seconds",
    "grace_s": "--grace",
    "allowed_hosts": "--allowed-host",
    "allowed_origins": "--allowed-origin",
    "sequences": "--batch",
    "num_streams": "--streams",
    "num_stream_layers": "--stream-layers",
    "num_logits": "--tokens",
    "num_layers": "--layers",
    "HeadPlan.length": "--guesses",
}
_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors"), "export"),
    **dict.fromkeys(("typer", "rich"), "cli"),
    **{"onnxruntime": "cpu", "nncf": "compress", "matplotlib": "plots", "optimum": "optimum"},
}
"""Which extra of this package brings what a command may lack."""


def exit_code(error: MirrorError) -> int:
    """The exit status of an error, by its class."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), EXIT_FAILED)


def as_typed(message: str) -> str:
    """A message about a field, as one about the option that sets it.

    >>> as_typed("GenerationConfig.max_new_tokens is 0; allowed: 1 or more.")
    '--max-new-tokens is 0; allowed: 1 or more.'
    >>> as_typed("SpeculationConfig.gamma is 99; allowed: 1 to 31.")
    '-S gamma is 99; allowed: 1 to 31.'
    >>> as_typed("WarmStableDecay.budget_s is -1.0; it must be 0 or more")
    '--seconds is -1.0; it must be 0 or more'
    """
    return _FIELD.sub(_option, message)


def _option(found: re.Match[str]) -> str:
    owner, field = found.groups()
    if owner == "SpeculationConfig":
        return f"-S {field}"
    return _OTHER_NAMES.get(f"{owner}.{field}") or _OTHER_NAMES.get(field) or f"--{field.replace('_', '-')}"


def about_import(error: ImportError) -> str:
    """What to install for a package that a command lacks, in a sentence.

    >>> about_import(ModuleNotFoundError("No module named 'torch'", name="torch"))
    'This command needs the package torch, which is not installed: pip install "mirrorsd[export]".'
    """
    package = (error.name or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not package:
        return f"A package cannot be loaded: {error}. Install it again, or another version of it."
    extra = _EXTRAS.get(package)
    advice = f'pip install "mirrorsd[{extra}]"' if extra else f"pip install {package}"
    return f"This command needs the package {package}, which is not installed: {advice}."


def about_file(error: OSError) -> str:
    """What the system refused, in a sentence.

    >>> about_file(FileNotFoundError(2, "No such file or directory", "notes/out.json"))
    'notes/out.json: No such file or directory.'
    """
    if error.errno == errno.EBADF:
        return "The result cannot be written: stdout is closed."
    if error.filename is None:
        return f"The system refuses: {error.strerror or error}."
    return f"{error.filename}: {error.strerror}."
