"""The scaling of inputs isolates loud channels, and one range stands for all rows where that costs little."""

import torch

from mirrorsd.export.passes.input_scaling import scaling_of


def test_a_loud_channel_is_moved_into_the_weights() -> None:
    torch.manual_seed(0)
    rows, weight = torch.rand(400, 32) * 2 - 1, torch.randn(64, 32)
    quiet, quiet_error = scaling_of(rows, weight, is_normed=True)
    rows[:, 5] *= 100
    weight[:, 5] /= 100
    loud, loud_error = scaling_of(rows, weight, is_normed=True)
    assert quiet.largest is not None, "what a norm gives has one size"
    assert loud.factors is not None and loud.factors[5] > 10 * loud.factors.mean() / 2
    assert loud_error < 4 * quiet_error


def test_a_range_for_all_rows_is_for_rows_of_one_size() -> None:
    torch.manual_seed(0)
    rows = torch.randn(400, 32) * torch.logspace(-2, 2, 400)[torch.randperm(400), None]
    chosen, _ = scaling_of(rows, torch.randn(64, 32), is_normed=True)
    assert chosen.largest is None
    assert scaling_of(torch.randn(400, 32), torch.randn(64, 32), is_normed=False)[0].largest is None


def test_numbers_that_are_loud_in_one_row_each_are_rotated_into_their_neighbours() -> None:
    """No factor helps there, as every channel is loud somewhere."""
    torch.manual_seed(0)
    rows, weight = torch.randn(512, 128), torch.randn(64, 128)
    rows[torch.arange(512), torch.arange(512) % 128] *= 40
    scaled, rotated = (scaling_of(rows, weight, is_normed=False, is_rotated=is_rotated) for is_rotated in (False, True))
    assert (scaled[0].is_rotated, rotated[0].is_rotated) == (False, True)
    assert rotated[1] < scaled[1] / 4


def test_an_unused_channel_is_no_division_by_zero() -> None:
    rows = torch.randn(64, 16)
    rows[:, 3] = 0
    chosen, error = scaling_of(rows, torch.randn(8, 16), is_normed=True)
    assert error < 1e-2
    assert chosen.factors is None or bool((chosen.factors > 0).all())


def test_what_all_logits_of_a_row_have_in_common_does_not_count_for_a_head() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(400, 32), torch.randn(64, 32) + 20
    product, head = (scaling_of(rows, weight, is_normed=True, is_head=is_head)[1] for is_head in (False, True))
    assert head > 10 * product, "the product is large, and what tells its columns apart is not"
