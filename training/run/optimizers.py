"""The optimisers of every training here: Muon for matrices, AdamW for the rest.

Owns: which parameter goes where, the peak learning rates, and one step.
Does not own: the schedule (`schedule.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mirrorsd.graphs.errors import ConfigError

__all__ = ["descend", "make_optimizers", "set_rate"]


def make_optimizers(
    model: nn.Module, *, matrix_rate: float = 0.008, other_rate: float = 2.5e-3
) -> dict[str, torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for embeddings, head and norms.

    Each parameter group remembers its peak rate as `peak_lr`. Parameters that need no gradient are left out.
    A model may have weights of one sort only.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            is_matrix = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_matrix else others).append(weight)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "muon": torch.optim.Muon([{"params": matrices}], lr=matrix_rate, weight_decay=0.05, momentum=0.95),
        "adamw": torch.optim.AdamW([{"params": others}], lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    }
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    """Set every parameter group's learning rate to `share` of its `peak_lr`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = share * group["peak_lr"]


def descend(loss: Tensor, weights: Iterable[nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Take one step down the gradient of `loss`, its norm clipped at 1.

    Raises:
        ConfigError: it is no number: such a step would leave none of the weights.
    """
    torch.autograd.backward([loss])
    if not torch.isfinite(torch.nn.utils.clip_grad_norm_(weights, 1.0)):
        raise ConfigError(
            f"The training's gradient is no number any more (its loss is {float(loss.detach()):g}). What the last "
            "checkpoint has is kept: go on from it with --resume and a lower --rate."
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
