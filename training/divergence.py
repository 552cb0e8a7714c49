"""How far a student's predictions are from the target's, row by row.

Three measures of the same two distributions. KL is the usual one. Total variation is the share of tokens that exact
sampling rejects, so its gradient asks for acceptance itself (LK losses, arXiv 2602.23881: `-log` of what is accepted).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LOSSES", "divergence"]


def divergence(logits_by_target: Tensor, logits_by_student: Tensor, loss: str = "kl") -> tuple[Tensor, Tensor]:
    """Return the distance between target and student at temperature 1, and the cross-entropy with the target's argmax.

    Args:
        logits_by_target: `[..., V]`.
        logits_by_student: `[..., V]`, same shape.
        loss: One of `LOSSES`.

    Returns:
        Two tensors `[...]`: the distance (KL and LK in nats, TV as a share), and nats.
    """
    target_log, student_log = F.log_softmax(logits_by_target, -1), F.log_softmax(logits_by_student, -1)
    best = logits_by_target.argmax(-1, keepdim=True)
    return LOSSES[loss](target_log, student_log), -student_log.gather(-1, best).squeeze(-1)


def _kl(target_log: Tensor, student_log: Tensor) -> Tensor:
    return (target_log.exp() * (target_log - student_log)).sum(-1)


def _accepted(target_log: Tensor, student_log: Tensor) -> Tensor:
    """What exact sampling accepts: the mass that both distributions share."""
    return torch.minimum(target_log.exp(), student_log.exp()).sum(-1)


def _total_variation(target_log: Tensor, student_log: Tensor) -> Tensor:
    return 1 - _accepted(target_log, student_log)


def _lk(target_log: Tensor, student_log: Tensor) -> Tensor:
    return -_accepted(target_log, student_log).clamp(min=1e-6).log()


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"kl": _kl, "tv": _total_variation, "lk": _lk}
)
