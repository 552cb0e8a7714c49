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
        ├── ContextLengthError the prompt (or what it asks for) does not fit into the context
        └── ContinuationError  the text does not begin with the ids that it was to go on from

A message says what was found, what was expected, and what to do. What a device's own library raises becomes one of
these; `errors_of` says what that may be.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Self


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
    """The caller stopped the request.

    Attributes:
        result: the `GenerationResult` of what there was by then, where a session raised it.
    """

    result: Any = None


class ContextLengthError(GenerationError):
    """The prompt does not fit into the context of the bundle."""

    @classmethod
    def of(cls, context: int, found: str) -> Self:
        """Say it in OpenAI's words, which agents look for before they shorten a conversation.

        >>> str(ContextLengthError.of(512, "the prompt has 600")).partition(".")[0]
        "This model's maximum context length is 512 tokens, new ones included; the prompt has 600"
        """
        return cls(
            f"This model's maximum context length is {context} tokens, new ones included; {found}. Shorten the prompt, "
            "or export the bundle again with a larger --context."
        )


class ContinuationError(GenerationError):
    """The text does not begin with the ids that it was to go on from (`GenerationConfig.continue_from`)."""

    @classmethod
    def of(cls, place: int, found: str) -> Self:
        """Say where they part.

        >>> str(ContinuationError.of(3, "5 was given, 7 is chosen")).partition(".")[0]
        'continue_from is not how this text begins: at its token 3, 5 was given, 7 is chosen'
        """
        return cls(
            f"continue_from is not how this text begins: at its token {place}, {found}. The ids must come from a "
            "run of the same request, seed, bundle and arithmetic (an equal system_fingerprint)."
        )


def errors_of(library: ModuleType) -> tuple[type[Exception], ...]:
    """What calls into a compiled library may raise, whatever its version.

    Those are its own exceptions, which need not derive from `RuntimeError`, and what the C++ errors that it does not
    translate become in Python: `RuntimeError`, and `MemoryError` for a failed allocation.

    Args:
        library: The extension module that defines them.
    """
    own = (kind for kind in vars(library).values() if isinstance(kind, type) and issubclass(kind, Exception))
    return (RuntimeError, MemoryError, *dict.fromkeys(own))


@contextmanager
def raised_as(error: type[MirrorError], what: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Within it, each of `errors` becomes an `error` whose message begins with `what`."""
    try:
        yield
    except errors as found:
        raise error(f"{what}: {found}") from found
