"""Save and resume a training run; a kill at any moment leaves the last complete checkpoint.

Owns: one file per checkpoint, written beside and renamed into place.
Does not own: finished weights (those are ordinary model folders).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings, lists, dictionaries) to `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the state saved at `path`, or None where there is none yet.

    Nothing in the file is executed: only tensors and plain values are read.
    """
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
