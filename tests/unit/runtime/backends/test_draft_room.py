"""Passes of several drafts as one: every session is told what it is told alone, whatever the neighbours do."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mirrorsd.devices.draft_memory import CachePart, DraftPass, RowBlock, SlotCache
from mirrorsd.devices.draft_passes import Shape, any_bucket, host_arrays
from mirrorsd.devices.slot_draft import DraftNoise, PassBuffers, SlotDraft
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import DraftShape, draft_contract
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import DraftBucket
from mirrorsd.runtime.backends.draft_room import DraftRoom
from mirrorsd.runtime.backends.joint_rounds import JointRounds

VOCAB = 97
SHAPE = DraftShape(
    num_layers=1, vocab_size=VOCAB, num_kv_heads=1, head_dim=1, num_streams=1, num_candidates=1, num_noise_rows=16
)


class Request:
    """Reads every row's text through the mask, from slots and rows, and says the sum of what it has read."""

    def __init__(self, model: "Model", shape: Shape, cache: SlotCache) -> None:
        self.model, self.shape, self.cache = model, shape, cache
        self.arrays = host_arrays(draft_contract(SHAPE), shape, np.float32)
        self.buffers = PassBuffers(model.entry, self.arrays)
        self.noise: DraftNoise | None = None

    def bind(self, cache: SlotCache) -> None:
        if cache.capacity == self.shape[2]:
            self.cache = cache

    def use_noise(self, noise: DraftNoise) -> None:
        self.noise = noise

    def infer(self) -> None:
        self.model.passes.append(self.shape)
        if self.model.is_failing:
            raise DeviceError("it broke")
        arrays, ids = self.arrays, self.arrays[names.DRAFT_IDS][0]
        assert self.noise is not None
        columns = np.concatenate([self.cache.arrays[0][0, 0, :, 0], ids])
        for tip, row in enumerate(arrays[names.DRAFT_TIP_ROWS]):
            read = columns[arrays[names.DRAFT_MASK][0, 0, row] == 0]
            arrays[names.DRAFT_TIP_IDS][tip] = int(np.sum(read * np.arange(1, len(read) + 1))) % VOCAB
            arrays[names.DRAFT_TIP_LOGPROBS][tip, :, 0] = self.noise.rows[arrays[names.DRAFT_NOISE_ROWS][tip], 0]
        for new in self.buffers.new_rows:
            new[0, 0, :, 0] = ids


class Model:
    """A draft of one layer, whose keys are the tokens themselves."""

    def __init__(
        self, capacities: Sequence[int] = (8, 16, 32), most_rows: int = 100, *, is_fixed: bool = False
    ) -> None:
        buckets = [DraftBucket(rows=4, tips=4), DraftBucket(rows=16, tips=1)]
        self.entry: Any = SimpleNamespace(shape=SHAPE, buckets=buckets, capacities=list(capacities))
        self.shapes, self.buckets, self.most_rows, self.is_fixed = self, buckets, most_rows, is_fixed
        self.passes: list[Shape] = []
        self.is_failing = False
        self.rounds = JointRounds(DraftRoom(self.entry, self), takes_any=True)  # type: ignore[arg-type]

    def new_cache(self, capacity: int) -> SlotCache:
        return SlotCache(self.entry, capacity, np.float32)

    def new_request(self, shape: Shape, cache: SlotCache) -> Request:
        return Request(self, shape, cache)

    def joint_bucket(self, rows: int, tips: int, capacity: int) -> DraftBucket | None:
        assert capacity in self.entry.capacities
        bucket = DraftBucket(rows=16, tips=16) if self.is_fixed else any_bucket(rows, tips)
        return bucket if rows <= self.most_rows else None


class Text:
    """A session that drafts as `Drafter` does: a lead of new tokens, then guesses behind them that it may keep."""

    def __init__(self, model: Model, seed: int, *, is_sampled: bool = False) -> None:
        self.session = SlotDraft(model)  # type: ignore[arg-type]
        if is_sampled:
            self.session.use_noise(lambda position, size: np.full(size, 1000.0 * seed + position))
        self.tokens = [seed % VOCAB]
        self.num_fed = 0

    def asked(self) -> DraftPass:
        """The tokens that are new, and a branch of two behind all."""
        lead = RowBlock(self.tokens[self.num_fed :], self.num_fed, self.num_fed)
        branch = RowBlock([5, 6], len(self.tokens), self.num_fed, (), len(lead.tokens))
        first = len(lead.tokens) - 1
        return DraftPass(self.session, [lead, branch], [first, first + 2])

    def hears(self, guesses: Any) -> list[list[float]]:
        """Keep the lead, and go on with what the draft says."""
        num_new = len(self.tokens) - self.num_fed
        self.session.keep_rows(range(num_new), range(self.num_fed, len(self.tokens)))
        self.num_fed = len(self.tokens)
        self.tokens.append(int(guesses.ids[0, 0, 0]))
        return [guesses.ids.ravel().tolist(), guesses.logprobs.ravel().tolist()]


def alone(seed: int, num_passes: int, *, is_sampled: bool = False) -> list[Any]:
    model = Model()
    text = Text(model, seed, is_sampled=is_sampled)
    return [text.hears(model.rounds.run(text.asked())) for _ in range(num_passes)]


@pytest.mark.parametrize("is_sampled", [False, True])
def test_texts_are_told_together_what_they_are_told_alone(*, is_sampled: bool) -> None:
    model = Model()
    texts = [Text(model, seed, is_sampled=is_sampled and seed != 2) for seed in (1, 2, 3)]
    found: list[list[Any]] = [[], [], []]
    room = DraftRoom(model.entry, model)  # type: ignore[arg-type]
    for _ in range(7):
        guesses = room.run([text.asked() for text in texts], is_alone=False)
        for text, told, heard in zip(texts, guesses, found, strict=True):
            heard.append(text.hears(told))
    assert found == [alone(seed, 7, is_sampled=is_sampled and seed != 2) for seed in (1, 2, 3)]
    assert len(model.passes) == 7, "one pass for all"


def test_texts_come_go_and_grow_and_are_told_the_same() -> None:
    model = Model()
    room = DraftRoom(model.entry, model)  # type: ignore[arg-type]
    texts, found = {seed: Text(model, seed) for seed in (1, 2, 3)}, {1: [], 2: [], 3: []}  # type: ignore[var-annotated]
    turns = [(1, 2), (1,), (1, 2, 3), (3, 1), (2,), (2,), (1, 2, 3), (3, 2), (1, 3), (1, 2, 3), (3,), (1, 2, 3)]
    for number, turn in enumerate(turns):
        told = room.run([texts[seed].asked() for seed in turn], is_alone=number == 5)
        for seed, guesses in zip(turn, told, strict=True):
            found[seed].append(texts[seed].hears(guesses))
    assert found == {seed: alone(seed, len(heard)) for seed, heard in found.items()}
    assert any(isinstance(text.session.cache, CachePart) for text in texts.values())
    assert len(model.passes) == len(turns)


def test_one_that_goes_on_alone_has_a_cache_of_its_own_again() -> None:
    model = Model()
    room = DraftRoom(model.entry, model)  # type: ignore[arg-type]
    texts = [Text(model, 1), Text(model, 2)]
    for text, told in zip(texts, room.run([text.asked() for text in texts], is_alone=False), strict=True):
        text.hears(told)
    for is_alone, capacity in ((False, 16), (True, 8)):
        (told,) = room.run([texts[0].asked()], is_alone=is_alone)
        texts[0].hears(told)
        assert model.passes[-1][2] == capacity
    assert not isinstance(texts[0].session.cache, CachePart)


@pytest.mark.parametrize("model", [Model((8, 16)), Model(most_rows=7)], ids=["too few slots", "too many rows"])
def test_those_that_do_not_fit_have_passes_of_their_own(model: Model) -> None:
    room, found = DraftRoom(model.entry, model), [list[Any](), list[Any](), list[Any]()]  # type: ignore[arg-type]
    texts = [Text(model, seed) for seed in (1, 2, 3)]
    for _ in range(4):
        guesses = room.run([text.asked() for text in texts], is_alone=False)
        for text, told, heard in zip(texts, guesses, found, strict=True):
            heard.append(text.hears(told))
    assert found == [alone(seed, 4) for seed in (1, 2, 3)]
    assert len(model.passes) == 8, "two, and one"


def test_noise_that_a_pass_has_no_rows_for_is_not_mixed_up() -> None:
    """Of sixteen rows, one is that of texts without; two tips and their streams name four."""
    model, found = Model(), [list[Any]() for _ in range(5)]
    room, texts = DraftRoom(model.entry, model), [Text(model, seed, is_sampled=True) for seed in range(1, 6)]  # type: ignore[arg-type]
    for _ in range(2):
        guesses = room.run([text.asked() for text in texts], is_alone=False)
        for text, told, heard in zip(texts, guesses, found, strict=True):
            heard.append(text.hears(told))
    assert found == [alone(seed, 2, is_sampled=True) for seed in range(1, 6)]


def test_a_pass_that_fails_leaves_caches_as_they_were() -> None:
    model = Model()
    room = DraftRoom(model.entry, model)  # type: ignore[arg-type]
    texts, found = [Text(model, 1), Text(model, 2)], [list[Any](), list[Any]()]
    for number in range(4):
        model.is_failing = number in (0, 2)
        if model.is_failing:
            with pytest.raises(DeviceError, match="it broke"):
                room.run([text.asked() for text in texts], is_alone=False)
            continue
        guesses = room.run([text.asked() for text in texts], is_alone=False)
        for text, told, heard in zip(texts, guesses, found, strict=True):
            heard.append(text.hears(told))
    assert found == [alone(seed, 2) for seed in (1, 2)]


def heard_of(texts: Sequence[Text], rounds: JointRounds) -> list[Any]:
    """What texts are told whose jobs are done side by side."""
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = texts[number].hears(rounds.run(texts[number].asked()))

    rounds.work([partial(ask, number) for number in range(len(texts))])
    return [found[number] for number in range(len(texts))]


@pytest.mark.parametrize("way", ["fails", "does not fit"])
def test_passes_of_one_size_one_after_another_leave_each_its_own_answers(way: str) -> None:
    """All go through the same memory, in which the last one's stay."""
    model = Model(is_fixed=True)
    texts, found = [Text(model, seed) for seed in (1, 2, 3, 4)], []
    for number in range(3):
        model.most_rows = 7 if number and way == "does not fit" else 100
        failing = mock.patch.object(model.rounds._joint, "run", failing_once(model.rounds._joint.run))
        with failing if number and way == "fails" else nullcontext():
            found.append(heard_of(texts, model.rounds))
    assert [*zip(*found, strict=True)] == [tuple(alone(seed, 3)) for seed in (1, 2, 3, 4)]
    assert len({id(text.session.cache.whole) for text in texts}) == 1, "they share one cache"  # type: ignore[union-attr]


def failing_once(run: Any) -> Any:
    """The same, whose first call fails."""
    errors = [DeviceError("it broke")]

    def run_or_fail(passes: Sequence[DraftPass], *, is_alone: bool) -> Any:
        if errors:
            raise errors.pop()
        return run(passes, is_alone=is_alone)

    return run_or_fail


def test_what_a_session_has_been_told_stays_beside_what_its_neighbour_drafts_next() -> None:
    """Rows may be kept by a later job."""
    model = Model(is_fixed=True)
    texts = [Text(model, seed) for seed in (1, 2)]
    heard_of(texts, model.rounds)
    model.rounds.is_alone = False
    passes = [text.asked() for text in texts]
    told = [model.rounds.run(one) for one in passes]
    heard = [text.hears(guesses) for text, guesses in zip(texts, told, strict=True)]
    assert heard == [alone(seed, 2)[1] for seed in (1, 2)]
    assert [text.hears(model.rounds.run(text.asked())) for text in texts] == [alone(seed, 3)[2] for seed in (1, 2)]


def test_who_shares_a_cache_stays_there_whoever_is_missing() -> None:
    """Eight of which four fit into one pass: caches are moved for the first one, not whenever one has no job."""
    model, found = Model(), [list[Any]() for _ in range(8)]
    room, texts = DraftRoom(model.entry, model), [Text(model, seed) for seed in range(8)]  # type: ignore[arg-type]
    with mock.patch.object(room, "_seat", side_effect=room._seat) as seat:
        for number in range(6):
            present = [one for one in range(8) if number % 2 == 0 or one != number]
            told = room.run([texts[one].asked() for one in present], is_alone=False)
            for one, guesses in zip(present, told, strict=True):
                found[one].append(texts[one].hears(guesses))
    assert found == [alone(seed, len(heard)) for seed, heard in enumerate(found)]
    assert len(model.passes) == 2 * 6 and seat.call_count == 2
