"""How much memory a training takes, from the sizes alone, so that it is refused before anything is loaded.

Owns: the estimate and the refusal. Does not own: how much is free (the caller knows).
"""

from __future__ import annotations

from mirrorsd.graphs.errors import ConfigError

__all__ = ["check_memory", "training_bytes"]

_LIBRARIES = 600 << 20  # Python with PyTorch and transformers
_COPIES_OF_LOGITS = 6  # of target and student: logits, log-probabilities, gradients
_COPIES_OF_TRAINED = 4  # weights, gradients, two moments


def training_bytes(*, fixed: int, trained: int, tokens: int, vocab_size: int) -> int:
    """Estimate the bytes of a training in single precision.

    Args:
        fixed: Parameters that are only read (the target's).
        trained: Parameters that are trained.
        tokens: Tokens per step.
        vocab_size: Size of the vocabulary.
    """
    weights = 4 * (fixed + _COPIES_OF_TRAINED * trained)
    return _LIBRARIES + weights + 4 * _COPIES_OF_LOGITS * tokens * vocab_size


def check_memory(name: str, needed: int, free: int | None) -> None:
    """Refuse a training that does not fit; where nobody knows what is free, nothing is refused.

    Raises:
        ConfigError: More is needed than is free.
    """
    if free is not None and needed > free:
        raise ConfigError(
            f"{name} needs about {needed / 1e9:.1f} GB of memory (weights in single precision, logits of a step), "
            f"{free / 1e9:.1f} GB are free; close other programs, take fewer tokens per step, a smaller target, "
            "or a machine with more memory"
        )
