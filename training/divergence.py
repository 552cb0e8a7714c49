"""How far a student's predictions are from the target's, row by row."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["divergence"]


def divergence(logits_by_target: Tensor, logits_by_student: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(target || student) at temperature 1, and the cross-entropy with the target's argmax.

    Args:
        logits_by_target: `[..., V]`.
        logits_by_student: `[..., V]`, same shape.

    Returns:
        Two tensors `[...]`, in nats.
    """
    target_log, student_log = F.log_softmax(logits_by_target, -1), F.log_softmax(logits_by_student, -1)
    kl = (target_log.exp() * (target_log - student_log)).sum(-1)
    best = logits_by_target.argmax(-1, keepdim=True)
    return kl, -student_log.gather(-1, best).squeeze(-1)
