"""The two-step selection finds exactly what TopK finds."""

import pytest
import torch

from mirrorsd.export.stages.top_candidates import top_candidates


@pytest.mark.parametrize("width", [97, 4096, 5000, 32000])
@pytest.mark.parametrize("count", [1, 8, 32])
def test_same_as_topk(width: int, count: int) -> None:
    scores = torch.randn(5, width, generator=torch.Generator().manual_seed(width + count))
    values, ids = top_candidates(scores, count)
    expected_values, expected_ids = torch.topk(scores, count)
    assert torch.equal(values, expected_values)
    assert torch.equal(ids, expected_ids)


def test_best_entries_in_one_chunk_are_all_found() -> None:
    scores = torch.zeros(1, 4096)
    in_one_chunk = torch.arange(8) * 128 + 5
    scores[0, in_one_chunk] = torch.arange(8, 0, -1).float()
    assert torch.equal(top_candidates(scores, 8)[1][0], in_one_chunk)
