"""What other tests lean on: two stages count as the same only where everything in them is."""

import torch
from torch import nn
from traced_once import key_of


class Stage(nn.Module):
    def __init__(self, weight: torch.Tensor, **settings: object) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.settings = settings


def test_stages_that_differ_in_anything_have_other_keys() -> None:
    ones = torch.ones(2, 2)
    same = key_of(Stage(ones, layers=2), ("contract",))
    assert same is not None
    assert key_of(Stage(torch.ones(2, 2), layers=2), ("contract",)) == same
    tied = Stage(ones, layers=2)
    tied.other = tied.linear
    copied = Stage(ones, layers=2)
    copied.other = Stage(ones).linear
    others = [
        key_of(Stage(2 * ones, layers=2), ("contract",)),
        key_of(Stage(ones.double(), layers=2), ("contract",)),
        key_of(Stage(ones, layers=3), ("contract",)),
        key_of(Stage(ones, layers=2), ("another",)),
        key_of(tied, ("contract",)),
        key_of(copied, ("contract",)),
    ]
    assert len({same, *others}) == 7
    assert None not in others


def test_what_cannot_be_written_down_is_no_key() -> None:
    assert key_of(Stage(torch.ones(2, 2), decide=lambda: 1)) is None
