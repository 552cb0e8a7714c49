"""The one place that turns an error into an exit status.

0 done, 1 another generation error or a comparison that found a difference, 2 usage, 3 bad bundle or checkpoint,
4 device not available, 130 cancelled.
"""

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


def exit_code(error: MirrorError) -> int:
    """The exit status of an error, by its class."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), EXIT_FAILED)
