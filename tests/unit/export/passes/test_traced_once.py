"""What other tests lean on: two stages count as the same only where everything in them is."""

import onnx_ir as ir
import torch
from torch import nn
from traced_once import put_in

from mirrorsd.export.passes.stamping import digest_of


class Stage(nn.Module):
    def __init__(self, weight: torch.Tensor, **settings: object) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.settings = settings


def test_stages_that_differ_in_anything_have_other_keys() -> None:
    ones = torch.ones(2, 2)
    same = digest_of(Stage(ones, layers=2), ("contract",), without_numbers=())
    assert same is not None
    assert digest_of(Stage(torch.ones(2, 2), layers=2), ("contract",), without_numbers=()) == same
    tied = Stage(ones, layers=2)
    tied.other = tied.linear
    copied = Stage(ones, layers=2)
    copied.other = Stage(ones).linear
    others = [
        digest_of(Stage(2 * ones, layers=2), ("contract",), without_numbers=()),
        digest_of(Stage(ones.double(), layers=2), ("contract",), without_numbers=()),
        digest_of(Stage(ones, layers=3), ("contract",), without_numbers=()),
        digest_of(Stage(ones, layers=2), ("another",), without_numbers=()),
        digest_of(tied, ("contract",), without_numbers=()),
        digest_of(copied, ("contract",), without_numbers=()),
    ]
    assert len({same, *others}) == 7
    assert None not in others


def key_without_numbers(stage: Stage) -> str | None:
    return digest_of(stage, without_numbers=stage.parameters())


def test_numbers_that_are_left_out_are_no_difference_but_how_they_lie_is() -> None:
    same = key_without_numbers(Stage(torch.ones(4, 2)))
    assert key_without_numbers(Stage(torch.zeros(4, 2))) == same
    tied, untied = Stage(torch.ones(4, 2)), Stage(torch.ones(4, 2))
    tied.other, untied.other = nn.Linear(2, 4, bias=False), nn.Linear(2, 4, bias=False)
    tied.other.weight = nn.Parameter(tied.linear.weight.detach(), requires_grad=False)
    others = [Stage(torch.ones(8)), Stage(torch.ones(2, 4).T), Stage(torch.ones(4, 2).half()), tied, untied]
    assert len({same, *map(key_without_numbers, others)}) == 6


def test_a_graph_gets_the_numbers_of_the_stage_that_is_exported() -> None:
    number = ir.Value(name="linear.weight", const_value=ir.tensor(torch.zeros(4, 2), name="linear.weight"))
    graph = ir.Graph([], [], nodes=[], initializers=[number])
    put_in({"linear.weight": torch.ones(4, 2), "not read": torch.ones(1)}, graph)
    assert graph.initializers["linear.weight"].const_value.numpy().tolist() == [[1.0, 1.0]] * 4


def test_what_cannot_be_written_down_is_no_key() -> None:
    assert digest_of(Stage(torch.ones(2, 2), decide=(number for number in ())), without_numbers=()) is None


def test_functions_count_by_what_they_do() -> None:
    def counting(number: int) -> Stage:
        return Stage(torch.ones(2, 2), decide=lambda: number)

    same = digest_of(counting(1), without_numbers=())
    assert same is not None
    assert digest_of(counting(1), without_numbers=()) == same
    ways = [lambda: 1, lambda: same.lower(), lambda: same.upper(), lambda number=1: number, lambda number=2: number]
    others = [counting(2), *(Stage(torch.ones(2, 2), decide=way) for way in ways)]
    assert len({same, *(digest_of(other, without_numbers=()) for other in others)}) == 7
