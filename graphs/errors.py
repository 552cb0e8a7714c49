"""Every error that mirrorsd raises on purpose.

::

    MirrorError
    ├── ConfigError            a setting is out of its range, or two settings contradict each other
    ├── BundleError            a bundle is missing, damaged, of another schema, or leaves its folder
    ├── ExportError            a checkpoint cannot be exported
    │   └── ParityError        an exported stage does not compute what the checkpoint computes
    ├── DeviceError            a device, provider or driver is absent, or failed while running
    └── GenerationError        a request cannot be served
        ├── Cancelled          the caller stopped it
        └── ContextLengthError the prompt (or what it asks for) does not fit into the context

A message says what was found, what was expected, and what to do.
"""


class MirrorError(Exception):
    """Root of the tree: catch this to catch everything that mirrorsd raises on purpose."""


class ConfigError(MirrorError):
    """A setting is out of its range, or two settings contradict each other."""


class BundleError(MirrorError):
    """A bundle is missing, damaged, of another schema, or names a path outside its folder."""


class ExportError(MirrorError):
    """A checkpoint cannot be exported."""


class ParityError(ExportError):
    """An exported stage does not compute what the checkpoint computes."""


class DeviceError(MirrorError):
    """A device, provider or driver is absent, or failed while running."""


class GenerationError(MirrorError):
    """A request cannot be served."""


class Cancelled(GenerationError):  # noqa: N818 - the public name is the word people search for
    """The caller stopped the request."""


class ContextLengthError(GenerationError):
    """The prompt does not fit into the context of the bundle."""
