"""Which weights are in integers by row, and which numbers an embedding keeps."""

import pytest

from mirrorsd.export.integer_choice import by_row
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats

EIGHT, FOUR = BlockChoice(bits=8), BlockChoice(bits=4)


def test_a_tied_embedding_has_the_heads_numbers() -> None:
    found = by_row(WeightFormats(layers=EIGHT, head=EIGHT, embedding=EIGHT), {}, is_tied=True)
    assert found.head is not None and found.embedding is not None
    assert (found.head.is_by_row, found.embedding.is_by_row, found.num_rescored) == (True, True, 0)


def test_the_best_logits_of_a_coarse_head_are_computed_again_with_the_embeddings_blocks() -> None:
    found = by_row(WeightFormats(layers=EIGHT, head=EIGHT, embedding=EIGHT), {}, is_tied=True, is_scan=True)
    assert found.scan is not None and found.embedding is not None
    assert (found.scan.is_by_row, found.embedding.is_by_row, found.num_rescored) == (True, False, 32)


@pytest.mark.parametrize(("head", "embedding"), [(FOUR, EIGHT), (EIGHT, FOUR), (EIGHT, None), (None, EIGHT)])
def test_weights_without_eight_bits_are_computed_once(head: BlockChoice | None, embedding: BlockChoice | None) -> None:
    found = by_row(WeightFormats(layers=EIGHT, head=head, embedding=embedding), {}, is_tied=True, is_scan=True)
    assert found.scan is None
