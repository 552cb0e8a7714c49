"""Checkpoints with one fault each: loaded as transformers loads them, or refused by the file's name."""

import pytest
from mutated_checkpoints import ALLOWED, Mutation, Verdict, run


@pytest.mark.filterwarnings("ignore:.*has no place for")
@pytest.mark.parametrize(
    ("number", "seed"),
    [
        pytest.param(60, 3, id="60"),
        pytest.param(2000, 1, id="2000", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_a_mutated_checkpoint_is_loaded_as_by_transformers_or_refused(number: int, seed: int) -> None:
    wrong: list[tuple[int, Mutation, Verdict]] = []

    def tell(count: int, mutation: Mutation, verdict: Verdict) -> None:
        if verdict.kind not in ALLOWED:
            wrong.append((count, mutation, verdict))

    found = run(number, seed, tell)
    kinds = {verdict.kind for _, verdict in found}
    assert not wrong
    assert {"same", "refused by both"} <= kinds, "mutations of both kinds must have been tried"
