"""Who sits where in a joint pass, and what its stages are told of that."""

import numpy as np
import pytest

from mirrorsd.devices.onnxruntime.packed_graph import (
    OWN_HEADS,
    ROW_POSITIONS,
    SLOT_HEADS,
    SLOT_MASK,
    SLOT_PLACES,
    SLOT_SIZES,
    Heads,
    guest_rows,
    of_table,
)
from mirrorsd.runtime.backends.onnxruntime.seating import Slots, plan_of, too_much

GUEST = -1
ROOM_ROWS = 50
SLOTS = Slots(2, 4, Heads(2, 3), fewest_tokens=0, most_tokens=40, spare_rows=1)
ONE_EACH = SLOTS._replace(heads=Heads(3, 1))


@pytest.mark.parametrize("slots", [SLOTS, ONE_EACH], ids=["shared heads", "one each"])
@pytest.mark.parametrize(
    "counts",
    [
        ((0, 1), (1, 1)),
        ((5, 1), (0, 1), (3, 1)),
        ((2, 3), (GUEST, 12), (0, 1), (6, 8)),
        ((GUEST, 1), (7, 1)),
    ],
    ids=["a table", "two, out of order", "windows and a prompt", "a long text beside"],
)
def test_every_row_gets_back_what_its_own_heads_have_found(counts: tuple[tuple[int, int], ...], slots: Slots) -> None:
    """With attention that gives back its queries, numbered through."""
    num_heads, shared = slots.heads
    num_queries, width = num_heads * shared, num_heads * (shared + 2)
    num_rows = sum(count for _, count in counts)
    plan = plan_of(counts, slots)
    own = np.arange(num_rows * width).reshape(num_rows, width)
    *tables, kept = np.split(own.reshape(-1)[plan.fixed[SLOT_HEADS]], np.cumsum(plan.fixed[SLOT_SIZES])[:-1])
    guest = own[plan.fixed[guest_rows(0)], :num_queries].reshape(-1)
    found = np.concatenate([*tables, guest])[plan.fixed[OWN_HEADS]]
    assert found.tolist() == own[:, :num_queries].reshape(-1).tolist()

    seated = [row for (slot, _), rows in zip(counts, _rows_of(counts), strict=True) if slot != GUEST for row in rows]
    assert kept.tolist() == own[seated, num_queries:].reshape(-1).tolist()
    starts = [3 + 2 * number for number in range(len(counts))]
    positions = np.concatenate([np.arange(n) + start for (_, n), start in zip(counts, starts, strict=True)])
    told = plan.told(positions, ROOM_ROWS)
    assert told.inputs[ROW_POSITIONS].tolist() == [positions.tolist()]
    room = np.arange(2 * 8 * num_heads * ROOM_ROWS).reshape(2, 8, num_heads, ROOM_ROWS)
    expected = [
        room[:, slot, :, start + row].reshape(-1).tolist()
        for (slot, count), start in zip(counts, starts, strict=True)
        if slot != GUEST
        for row in range(count)
    ]
    assert told.inputs[SLOT_PLACES].reshape(len(seated), -1).tolist() == expected


def _rows_of(counts: tuple[tuple[int, int], ...]) -> list[range]:
    ends = np.cumsum([count for _, count in counts]).tolist()
    return [range(end - count, end) for (_, count), end in zip(counts, ends, strict=True)]


def test_a_row_sees_its_text_up_to_itself_and_what_stands_in_for_one_a_single_token() -> None:
    told = plan_of(((0, 2), (2, 1)), SLOTS).told(np.array([5, 6, 9]), ROOM_ROWS)
    assert told.lengths == [9 + 1 + 2 * 3, 0 + 1 + 3]
    mask = told.inputs[of_table(SLOT_MASK, 0)]
    assert mask.shape == (1, 4 * 2, 2 * 3, told.lengths[0])
    seen = (mask.reshape(4, 2, 2, 3, -1) == 0).sum(axis=-1)
    assert seen[:, 0, :, 0].tolist() == [[6, 7], [1, 1], [10, 1], [1, 1]]
    assert (seen == seen[:, :1, :, :1]).all(), "the same for all heads"


def test_a_guest_has_a_spare_row_and_nobody_has_one_row() -> None:
    assert plan_of(((GUEST, 2), (0, 1)), SLOTS).fixed[guest_rows(0)].tolist() == [0, 1, 1]
    assert plan_of(((1, 1), (0, 1)), SLOTS).fixed[guest_rows(0)].tolist() == [0]


def test_the_plan_of_a_pass_is_made_once() -> None:
    assert plan_of(((0, 1), (2, 1)), SLOTS) is plan_of(((0, 1), (2, 1)), SLOTS)


def test_whoever_holds_up_a_table_is_its_guest() -> None:
    assert too_much({0: (40, 1), 1: (40, 1)}, 4) is None
    assert too_much({0: (40, 1), 1: (400, 1), 2: (40, 1)}, 4) == 1
    assert too_much({0: (40, 1), 1: (40, 1), 2: (40, 8), 5: (40, 1)}, 4) == 2
