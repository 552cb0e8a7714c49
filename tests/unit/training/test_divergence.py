"""How far a student is from its target, and which way is down."""

import pytest
import torch
from torch import Tensor

from mirrorsd.families.decoder_parts import LogitScale
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.distill_draft import DistillConfig
from mirrorsd.training.divergence import LOSSES, Distance, HeadRows, LossMix, distance

TARGET = torch.tensor([[0.7, 0.2, 0.1]]).log()
STUDENT = torch.tensor([[0.5, 0.1, 0.4]]).log()
HEAD = torch.eye(3)


def compare(student: Tensor, mix: LossMix) -> Distance:
    """Logits as rows: the head changes nothing."""
    return distance(HeadRows(TARGET, HEAD), HeadRows(student, HEAD), torch.ones(1), mix)


@pytest.mark.parametrize(("loss", "wanted"), [("kl", 0.235528), ("tv", 0.3), ("lk", 0.356675)])
def test_three_distances_of_the_same_distributions(loss: str, wanted: float) -> None:
    """0.5 + 0.1 + 0.1 is shared, so 0.3 is rejected and LK is -log 0.7; KL is 0.7 log 1.4 + 0.2 log 2 - 0.1 log 4."""
    found = compare(STUDENT, LossMix(**{loss: 1.0}))
    assert found.soft.item() == pytest.approx(wanted, abs=1e-5)
    assert found.total.item() == pytest.approx(wanted, abs=1e-5)
    assert found.is_best.item() == 1


def test_the_best_token_counts_beside_the_distance_and_does_not_change_what_that_is_said_to_be() -> None:
    """The target's best has half of the student's mass: log 2."""
    found = compare(STUDENT, LossMix(tv=0.75, hard=0.25))
    assert found.soft.item() == pytest.approx(0.3, abs=1e-5)
    assert found.total.item() == pytest.approx(0.75 * 0.3 + 0.25 * 0.693147, abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_down_any_of_them_comes_nearer(loss: str) -> None:
    student, mix = STUDENT.clone().requires_grad_(), LossMix(**{loss: 1.0})
    before = compare(student, mix).total
    torch.autograd.backward([before])
    assert student.grad is not None
    assert compare(student - 0.1 * student.grad, mix).total < before
    assert compare(TARGET, mix).total.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("scale", [LogitScale(), LogitScale(divisor=2.0, cap=3.0)], ids=["plain", "scaled and capped"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_slopes_are_those_that_autograd_finds(
    loss: str, scale: LogitScale, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several chunks and parts of them, with rows that count differently and a target that has more tokens."""
    monkeypatch.setattr("mirrorsd.training.divergence._CHUNK_NUMBERS", 4 * 48)
    monkeypatch.setattr("mirrorsd.training.divergence._CACHED_NUMBERS", 3 * 48)
    torch.manual_seed(0)
    target = HeadRows(torch.randn(3, 7, 16), torch.randn(50, 16))
    rows, head = torch.randn(3, 7, 8, requires_grad=True), torch.randn(48, 8, requires_grad=True)
    weights = torch.rand(3, 7)
    found = distance(target, HeadRows(rows, head, scale), weights, LossMix(**{loss: 0.8}, hard=0.2)).total
    true = _by_autograd(target, scale(rows @ head.T), weights, loss)
    assert found.item() == pytest.approx(true.item(), rel=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found, (rows, head)), torch.autograd.grad(true, (rows, head)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def _by_autograd(target: HeadRows, logits: Tensor, weights: Tensor, loss: str) -> Tensor:
    by_target = (target.rows @ target.head[: logits.shape[-1]].T).log_softmax(-1)
    by_student = logits.log_softmax(-1)
    shared = torch.minimum(by_target.exp(), by_student.exp()).sum(-1)
    soft = {"kl": (by_target.exp() * (by_target - by_student)).sum(-1), "tv": 1 - shared, "lk": -shared.log()}[loss]
    hard = -by_student.gather(-1, by_target.argmax(-1, keepdim=True))[..., 0]
    return ((0.8 * soft + 0.2 * hard) * weights).sum()


def test_another_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss is 'js'; allowed: kl, tv, lk"):
        DistillConfig(loss="js")
