import pytest
import torch

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.distill_draft import DistillConfig
from mirrorsd.training.divergence import LOSSES, divergence

TARGET = torch.tensor([[0.7, 0.2, 0.1]]).log()
STUDENT = torch.tensor([[0.5, 0.1, 0.4]]).log()


@pytest.mark.parametrize(("loss", "wanted"), [("kl", 0.235528 + 0.138629 - 0.138629), ("tv", 0.3), ("lk", 0.356675)])
def test_three_distances_of_the_same_distributions(loss: str, wanted: float) -> None:
    """0.5 + 0.1 + 0.1 is shared, so 0.3 is rejected and LK is -log 0.7; KL is 0.7 log 1.4 + 0.2 log 2 - 0.1 log 4."""
    distance, of_best = divergence(TARGET, STUDENT, loss)
    assert distance.item() == pytest.approx(wanted, abs=1e-5)
    assert of_best.item() == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_down_any_of_them_comes_nearer(loss: str) -> None:
    student = STUDENT.clone().requires_grad_()
    before, _ = divergence(TARGET, student, loss)
    torch.autograd.backward([before.sum()])
    assert student.grad is not None
    after, _ = divergence(TARGET, student - 0.1 * student.grad, loss)
    assert after < before
    assert divergence(TARGET, TARGET, loss)[0].item() == pytest.approx(0.0, abs=1e-6)


def test_another_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss is 'js'; allowed: kl, tv, lk"):
        DistillConfig(loss="js")
