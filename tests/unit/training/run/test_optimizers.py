"""A step that would leave no number of the weights is not taken."""

import pytest
import torch
from torch import nn

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.run.optimizers import descend


def test_a_loss_that_is_no_number_ends_the_training_before_the_weights_are_gone() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    loss = layer(torch.tensor([[float("inf"), 1.0]])).sum() * 0.0
    with pytest.raises(ConfigError, match=r"no number any more .*--resume and a lower --rate"):
        descend(loss, layer.parameters(), [optimizer])
    assert torch.equal(layer.weight, before)
