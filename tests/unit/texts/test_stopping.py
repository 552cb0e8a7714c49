"""Stop conditions on a real byte-level tokenizer: ends, hold-back, characters split over tokens."""

import threading

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.runtime.decoding.protocol import InFlight, Outcome, Stop, Written
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.step import run_steps
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig
from mirrorsd.texts.shown_text import IncrementalDecoder, StopWatch


@pytest.fixture
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def follow(tokenizer: Tokenizer, text: str, **settings: object) -> tuple[list[str], str | None]:
    watch = StopWatch(GenerationConfig(**settings), (tokenizer.token_to_id("<end>"),), IncrementalDecoder(tokenizer))
    pieces = []
    for token in tokenizer.encode(text).ids:
        piece = watch.push(token)
        pieces.append(piece.text)
        if piece.stop_reason:
            return pieces, piece.stop_reason
    last = watch.finish("length")
    return [*pieces, last.text], None if last.stop_reason == "length" else last.stop_reason


def test_text_arrives_token_by_token(tokenizer: Tokenizer) -> None:
    assert follow(tokenizer, "abc") == (["a", "b", "c", ""], None)


def test_split_characters_wait_until_they_are_whole(tokenizer: Tokenizer) -> None:
    pieces, _ = follow(tokenizer, "né€😀!")
    assert "".join(pieces) == "né€😀!"
    assert all("�" not in piece for piece in pieces)


def test_end_of_sequence_ends_unless_ignored(tokenizer: Tokenizer) -> None:
    assert follow(tokenizer, "ab<end>cd") == (["a", "b", ""], "eos")
    assert "".join(follow(tokenizer, "ab<end>cd", ignore_eos=True)[0]) == "abcd"


def test_stop_string_is_cut_and_its_beginning_held_back(tokenizer: Tokenizer) -> None:
    pieces, reason = follow(tokenizer, "one\nUser: two", stop_strings=("\nUser:",))
    assert ("".join(pieces), reason) == ("one", "stop_string")
    assert pieces[3:8] == ["", "", "", "", ""]


def test_a_beginning_that_is_no_stop_string_is_released(tokenizer: Tokenizer) -> None:
    pieces, reason = follow(tokenizer, "a ENx END", stop_strings=("END",))
    assert ("".join(pieces), reason) == ("a ENx ", "stop_string")


def test_unfinished_beginning_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    assert "".join(follow(tokenizer, "abEN", stop_strings=("END",))[0]) == "abEN"


def test_stop_token_is_shown_and_ends(tokenizer: Tokenizer) -> None:
    stop_id = tokenizer.token_to_id("c")
    assert follow(tokenizer, "abcd", stop_token_ids=(stop_id,)) == (["a", "b", "c"], "stop_token")


class Grouped:
    """A decoder whose steps commit the tokens of a text in the given groups."""

    name = "serial"

    def __init__(self, groups: list[list[int]], config: GenerationConfig) -> None:
        self.request = Request([0], config, SpeculationConfig(), 200, threading.Event())
        self._groups = iter(groups)

    def start(self) -> InFlight:
        return InFlight(0, np.zeros(0, np.int64))

    def step(self, inflight: InFlight) -> Outcome:
        tokens = next(self._groups)
        self.request.commit(tokens, [1.0] * len(tokens), 0.0)
        self.request.record(StepRecord(0.0, 1.0, len(tokens) - 1, len(tokens) - 1, "none", self.name, 1.0))
        return Outcome(tokens, len(tokens) - 1, inflight, self.name)

    def close(self) -> None: ...


def grouped(tokens: list[int], random: np.random.Generator) -> list[list[int]]:
    cuts = sorted(set(random.integers(1, len(tokens), 6).tolist()))
    return [tokens[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


@pytest.mark.parametrize("stop", ["lazy", "z", "y d", "no such text", "€😀"])
def test_how_steps_group_the_tokens_changes_neither_text_nor_end(tokenizer: Tokenizer, stop: str) -> None:
    tokens = tokenizer.encode("the quick né€😀 fox and the lazy dog<end>and more").ids
    random, seen = np.random.default_rng(3), set()
    config = GenerationConfig(stop_strings=stop, max_new_tokens=len(tokens))
    for _ in range(50):
        watch = StopWatch(config, (tokenizer.token_to_id("<end>"),), IncrementalDecoder(tokenizer))
        events = list(run_steps(Grouped(grouped(tokens, random), config), watch))
        text = "".join(event.text for event in events if isinstance(event, Written))
        last = events[-1]
        assert isinstance(last, Stop)
        seen.add((text, last.reason, tuple(last.token_ids)))
    assert len(seen) == 1
