"""Save and resume a training run; a kill at any moment leaves the last complete checkpoint.

Owns: one file per checkpoint, written beside and renamed into place.
Does not own: finished weights (those are ordinary model folders).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.whole_file import whole_file

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings, lists, dictionaries) to `path` atomically.

    Raises:
        OSError: It cannot be written, as on a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_file(path, survives_power_cuts=True) as stream:
            torch.save(state, stream)
    except RuntimeError as error:  # PyTorch's, about the file that the first error has left
        if not isinstance(error.__context__, OSError):
            raise
        error.__context__.filename = str(path)
        raise error.__context__ from None


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the state saved at `path`, or None where there is none yet.

    Nothing in the file is executed: only tensors and plain values are read.

    Raises:
        ConfigError: The file is not a whole checkpoint.
    """
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{path} is not a whole checkpoint ({str(error).splitlines()[0]}): it was cut short, or is still being "
            "copied. Copy it again; or remove it, and the training starts from the beginning"
        ) from error
    return state
