"""Which tokens count, and which source a text's characters have, as texts are held back and cut."""

from mirrorsd.runtime import GeneratedToken
from mirrorsd.server.answers.shown import ShownTokens


def token(number: int, num_decoded: int, source: str = "plain") -> GeneratedToken:
    return GeneratedToken(number, source, num_decoded=num_decoded)


def test_a_token_counts_when_some_of_its_own_characters_are_shown() -> None:
    shown = ShownTokens()
    counted, pieces = shown.take([token(1, 4), token(2, 3, "window")], "Once")
    assert [(placed.token.id, placed.offset) for placed in counted] == [(1, 0)]
    assert pieces == [("Once", "plain")]
    counted, pieces = shown.take([token(3, 2, "lookup")], " upo")
    assert [(placed.token.id, placed.offset) for placed in counted] == [(2, 4), (3, 7)]
    assert pieces == [(" up", "window"), ("o", "lookup")]
    assert shown.take([], "n", is_last=True) == ([], [("n", "lookup")])


def test_tokens_behind_a_stop_string_do_not_count() -> None:
    shown = ShownTokens()
    shown.take([token(1, 4)], "Once")
    assert shown.take([token(2, 3), token(3, 0)], "", is_last=True) == ([], [])


def test_what_no_token_decoded_to_is_the_last_one_s() -> None:
    """Bytes that stay unfinished are shown at the end."""
    shown = ShownTokens()
    shown.take([token(1, 4, "window"), token(2, 0)], "Once")
    assert shown.take([], "\N{REPLACEMENT CHARACTER}", is_last=True)[1] == [("\N{REPLACEMENT CHARACTER}", "window")]
