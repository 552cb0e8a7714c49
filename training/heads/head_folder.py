"""A head's files: `config.json` and the weights that are its own; what it borrows comes from its target.

Owns: writing, reading, and filling in the borrowed tensors. Does not own: what the entries mean (`HeadConfig`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from mirrorsd.families.heads import HeadConfig, HeadNetwork, build_head
from mirrorsd.families.heads.layouts import is_published
from mirrorsd.families.heads.lending import lent_by
from mirrorsd.families.heads.published import convert_head
from mirrorsd.families.registry import parts_of
from mirrorsd.graphs.errors import ExportError

__all__ = ["WEIGHTS_FILE", "OwnWeights", "lend", "load_head", "own_tensors", "save_head"]

WEIGHTS_FILE = "model.safetensors"


def own_tensors(network: HeadNetwork) -> dict[str, Tensor]:
    """The tensors of a head that are not its target's."""
    return {name: tensor for name, tensor in network.state_dict().items() if name not in network.config.borrowed}


class OwnWeights:
    """A head as a part of a training's checkpoint: without what is its target's."""

    def __init__(self, network: HeadNetwork) -> None:
        """Stand for `network`."""
        self._network = network

    def state_dict(self) -> dict[str, Tensor]:
        """Return the head's own tensors."""
        return own_tensors(self._network)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take them back.

        Raises:
            RuntimeError: They are of another head.
        """
        _fill(self._network, state)


def lend(network: HeadNetwork, target: PreTrainedModel) -> None:
    """Let `network` read what it borrows of the target, frozen; nothing is copied.

    Raises:
        ConfigError: The target's are of other sizes than the head's.
    """
    for name, parameter in lent_by(target, network).items():
        owner, _, entry = name.rpartition(".")
        setattr(network.get_submodule(owner), entry, torch.nn.Parameter(parameter.detach(), requires_grad=False))


def save_head(network: HeadNetwork, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
    """Write a head into `folder`; floating-point tensors as `dtype`."""
    network.config.write(folder)
    kept = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in own_tensors(network).items()
    }
    save_file(kept, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_head(folder: Path, target: PreTrainedModel) -> HeadNetwork:
    """Read a head in single precision, with what it borrows of `target`; published ones are read as ours.

    Raises:
        ConfigError: Not a head's folder, or one of another target.
        ExportError: Its weights are missing or do not belong to its config, or a published one is not of our kinds.
    """
    config = _published_config(folder / "config.json")
    of_ours = None if config else HeadConfig.read(folder)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
        if of_ours is None:
            num_layers = int(target.config.num_hidden_layers)
            read = convert_head(config, tensors, num_layers, lambda: parts_of(target).lm_head.weight.detach())
            of_ours, tensors = read.config, read.tensors
        network = build_head(of_ours)
        _fill(network, {name: _single(tensor) for name, tensor in tensors.items()})
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ExportError(f"the weights of {folder} do not belong to its config.json: {error}") from error
    lend(network, target)
    return network.to(target.device).eval()


def _published_config(path: Path) -> dict[str, Any]:
    """The config of a published head; nothing of ours, or where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and is_published(found) else {}


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _fill(network: HeadNetwork, tensors: dict[str, Tensor]) -> None:
    """Load a head's own tensors, all of them and no other.

    Raises:
        RuntimeError: Some are missing, unknown or of other shapes.
    """
    found = network.load_state_dict(tensors, strict=False)
    lacking = sorted(set(found.missing_keys) - set(network.config.borrowed))
    if lacking or found.unexpected_keys:
        raise RuntimeError(f"missing {lacking[:3]}, unknown {found.unexpected_keys[:3]}")
