"""Stop conditions on a real byte-level tokenizer: ends, hold-back, characters split over tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.runtime.generation_config import GenerationConfig
from mirrorsd.runtime.incremental_decoder import IncrementalDecoder
from mirrorsd.runtime.stopping import StopWatch


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
