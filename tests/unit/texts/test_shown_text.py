"""Streamed text: pieces add up to the decoding of the whole, for every kind of decoder and any sequence of ids."""

import time
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.shown_text import IncrementalDecoder, StopWatch

NUM_SEQUENCES = 20_000
WORDS = ["▁", "▁▁", "▁hello", "▁world", "hel", "lo", ".", "▁a", "a", "b", "▁END", "EN", "D", "�", "你", "😀", "▁é"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
NEW_LINE, LONE, STAR = "<0x0A>", "<0xFF>", "a"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["hello", " world", " é", "你", "你😀", "END", " E", "a\n", "�"]
    written = [in_bytes.pre_tokenize_str(word)[0][0] for word in words]
    halves = [word[:-1] for word in written] + [word[1:] for word in written]  # characters cut in the middle
    vocab = dict.fromkeys([*alphabet, *written, *(half for half in halves if half)])
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocab)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    return with_added_tokens(made)


def byte_fallback() -> Tokenizer:
    """As Llama 2, Mistral and Phi-3 have it; Gemma's is the same without the last part."""
    vocab = {text: i for i, text in enumerate(["<unk>", *BYTES, *WORDS])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return with_added_tokens(made)


def word_piece() -> Tokenizer:
    words = [
        "hello",
        "##lo",
        "world",
        "##s",
        ".",
        ",",
        "'",
        "n",
        "t",
        "do",
        "not",
        "##'s",
        "E",
        "##N",
        "##D",
        "你",
        "!",
    ]
    made = Tokenizer(models.WordPiece(vocab={text: i for i, text in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return with_added_tokens(made)


def metaspace() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(["<unk>", *WORDS])}, merges=[]))
    made.decoder = decoders.Metaspace()
    return with_added_tokens(made)


def no_decoder() -> Tokenizer:
    made = Tokenizer(models.WordLevel(vocab={text: i for i, text in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"))
    return with_added_tokens(made)


def with_added_tokens(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens(["<end>", "<|user|>"])
    made.add_tokens(["added"])
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "word piece": word_piece,
    "metaspace": metaspace,
    "none": no_decoder,
}


def random_ids(tokenizer: Tokenizer, random: np.random.Generator, most: int) -> list[int]:
    """Any id, one that is in no vocabulary included; half of the texts are made of few tokens only."""
    size = tokenizer.get_vocab_size()
    pool = np.arange(size + 1)
    if random.random() < 0.5:
        tiny = random.integers(0, size, 6)
        pool = np.concatenate([tiny, [tokenizer.token_to_id("<end>")]])
    return [int(token) for token in random.choice(pool, random.integers(0, most + 1))]


def whole_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """What decoding everything at once adds to the prompt's text."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    assert whole.startswith(before)
    return str(whole[len(before) :])


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> str:
    decoder = IncrementalDecoder(tokenizer, prompt)
    return "".join([*map(decoder.push, ids), decoder.finish()])


@pytest.mark.parametrize("count", [NUM_SEQUENCES // 5, pytest.param(NUM_SEQUENCES, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_ids_add_up_to_the_whole(kind: str, count: int) -> None:
    tokenizer, random = KINDS[kind](), np.random.default_rng(5)
    word = [tokenizer.token_to_id(text) for text in ("hello", "▁hello") if tokenizer.token_to_id(text) is not None]
    prompts = [[], word[-1:], [*word[-1:], tokenizer.token_to_id("<|user|>")]]
    for number in range(count):
        ids = random_ids(tokenizer, random, most=24)
        prompt = prompts[number % len(prompts)]
        assert stream(tokenizer, ids, prompt) == whole_text(tokenizer, prompt, ids), (prompt, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_cuts_the_whole_at_its_first_place(kind: str) -> None:
    """What comes first, stop string or end, is said by the tokens one by one: never by how steps group them."""
    tokenizer, random = KINDS[kind](), np.random.default_rng(6)
    end = tokenizer.token_to_id("<end>")
    stops = ("\n", "END", " a", "�", "lo wor", "...")
    config, num_cut = GenerationConfig(stop_strings=stops), 0
    for _ in range(NUM_SEQUENCES // 10):
        ids = random_ids(tokenizer, random, most=24)
        until_end = ids[: ids.index(end)] if end in ids else ids
        whole = whole_text(tokenizer, [], until_end)
        places = [whole.find(stop) for stop in stops if stop in whole]
        watch, shown, reason = StopWatch(config, (end,), IncrementalDecoder(tokenizer)), "", None
        for token in ids:
            piece = watch.push(token)
            shown, reason = shown + piece.text, piece.stop_reason
            if reason is not None:
                break
        if reason is None:
            text, reason, _ = watch.finish("length")
            shown += text
        num_cut += bool(places)
        assert shown == whole[: min(places, default=None)], ids
        assert reason == ("stop_string" if places else "eos" if end in ids else "length"), ids
    assert num_cut > 100


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [tokenizer.token_to_id(text) for text in texts]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((NEW_LINE, LONE, "a"), "��a"),
        (("<0xE4>", "<0xBD>", "<0xA0>", "<0x80>", "a"), "����a"),
        ((NEW_LINE, "<0xE4>", "▁world"), "�� world"),
        ((NEW_LINE, "▁world"), "\n world"),
        (("<0xE4>", "<end>", "<0xBD>", "<0xA0>", "▁world"), "你 world"),
    ],
)
def test_a_byte_that_spoils_its_run_spoils_no_stream(texts: tuple[str, ...], expected: str) -> None:
    tokenizer = byte_fallback()
    prompt = ids_of(tokenizer, "▁hello")
    assert stream(tokenizer, ids_of(tokenizer, *texts), prompt) == expected


def test_a_newline_made_of_a_byte_comes_with_the_next_token() -> None:
    tokenizer = byte_fallback()
    decoder = IncrementalDecoder(tokenizer, ids_of(tokenizer, "▁hello"))
    pieces = [decoder.push(token) for token in ids_of(tokenizer, ".", NEW_LINE, NEW_LINE, "▁a", "b")]
    assert pieces == [".", "", "", "\n\n a", "b"]


@pytest.mark.parametrize("kind", ["byte fallback", "metaspace"])
def test_a_continuation_keeps_its_leading_space(kind: str) -> None:
    tokenizer = KINDS[kind]()
    world = ids_of(tokenizer, "▁world")
    assert stream(tokenizer, world, ids_of(tokenizer, "▁hello")) == " world"
    assert stream(tokenizer, world, ids_of(tokenizer, "▁hello", "<|user|>")) == " world"
    assert stream(tokenizer, world, ids_of(tokenizer, "<|user|>")) == "world", "as decoding the whole has it"


def test_a_continuation_of_bytes_alone_keeps_its_leading_space() -> None:
    tokenizer = byte_fallback()
    prompt = ids_of(tokenizer, "<|user|>", "▁", "<0xE1>", "<0x80>", "<0x80>")
    for asked in (prompt, prompt[2:]):
        assert stream(tokenizer, ids_of(tokenizer, "▁world"), asked) == " world"


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_a_character_that_the_prompt_began_is_finished(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    parts = ids_of(tokenizer, "<0xE4>", "<0xBD>", "<0xA0>") if make is byte_fallback else ids_of(tokenizer, *"ä½ł")
    hello = ids_of(tokenizer, "hel" if make is byte_fallback else "hello")
    assert stream(tokenizer, [*parts[2:], *hello], [*hello, *parts[:2]]).startswith("你hel")
    assert stream(tokenizer, hello, [*hello, *parts[:2]]).startswith("hel")


@pytest.mark.parametrize("texts", [("Ā",), ("ä", "½"), ("<end>",)])
def test_a_long_text_of_rubbish_streams_in_linear_time_and_is_not_all_held_back(texts: tuple[str, ...]) -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, *texts) * (40_000 // len(texts))
    decoder, started = IncrementalDecoder(tokenizer), time.perf_counter()
    shown = "".join(map(decoder.push, ids))
    assert time.perf_counter() - started < 20
    whole = whole_text(tokenizer, [], ids)
    assert whole.startswith(shown)
    assert len(whole) - len(shown) < 16


def test_a_token_with_a_text_of_its_own_takes_two_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind its anchor, and one by itself as the next anchor."""
    made = byte_level()
    ids = [made.token_to_id(text) for text in ("hello", "Ġworld", "END")] * 4
    decoder = IncrementalDecoder(made, ids[:1])
    asked: list[list[int]] = []
    decode = IncrementalDecoder._decode

    def counted(self: IncrementalDecoder, tokens: list[int]) -> str:
        asked.append(tokens)
        return decode(self, tokens)

    monkeypatch.setattr(IncrementalDecoder, "_decode", counted)
    assert "".join(map(decoder.push, ids)) == "hello worldEND" * 4
    assert len(asked) == 2 * len(ids)


def test_a_long_run_of_bytes_streams_in_linear_time() -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "<0xE4>", "<0xBD>", "<0xA0>") * 15_000 + ids_of(tokenizer, "a")
    decoder, started = IncrementalDecoder(tokenizer), time.perf_counter()
    assert "".join(map(decoder.push, ids)) == "你" * 15_000 + "a"
    assert time.perf_counter() - started < 10


def test_a_stop_string_that_the_end_lets_out_still_stops() -> None:
    tokenizer = byte_fallback()
    config = GenerationConfig(stop_strings=("\n",))
    for end, reason in (("<end>", "eos"), ("b", "stop_token")):
        watch = StopWatch(config, ids_of(tokenizer, end), IncrementalDecoder(tokenizer))
        pieces = [watch.push(token) for token in ids_of(tokenizer, "a", NEW_LINE, end)]
        assert ("".join(piece.text for piece in pieces), pieces[-1].stop_reason) == ("a", "stop_string"), reason
    watch = StopWatch(config, (), IncrementalDecoder(tokenizer))
    assert [watch.push(token).text for token in ids_of(tokenizer, "a", NEW_LINE)] == ["a", ""]
    assert watch.finish("length") == ("", "stop_string", 0)


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_special_tokens_that_are_asked_for_are_text(make: Callable[[], Tokenizer]) -> None:
    """Pieces add up to the decoding of the whole with them, and a stop string may be made of them."""
    tokenizer, random = make(), np.random.default_rng(6)
    specials = [tokenizer.token_to_id("<end>"), tokenizer.token_to_id("<|user|>")]
    for _ in range(300):
        ids = random.integers(0, tokenizer.get_vocab_size(), 12)
        ids[random.integers(0, 12, 3)] = random.choice(specials)
        decoder = IncrementalDecoder(tokenizer, [specials[0]], skip_special_tokens=False)
        pieces = "".join(decoder.push(int(token)) for token in ids) + decoder.finish()
        assert "<end>" + pieces == tokenizer.decode([specials[0], *ids.tolist()], skip_special_tokens=False)
    config = GenerationConfig(stop_strings="<|user|>", skip_special_tokens=False)
    watch = StopWatch(config, (), IncrementalDecoder(tokenizer, skip_special_tokens=False))
    assert watch.push(specials[1]).stop_reason == "stop_string"
    silent = StopWatch(GenerationConfig(stop_strings="<|user|>"), (), IncrementalDecoder(tokenizer))
    assert silent.push(specials[1]) == ("", None, 0)


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_a_token_tells_what_it_decoded_to_whenever_that_is_shown(make: Callable[[], Tokenizer]) -> None:
    """Held back for a stop string that does not come, or never shown behind one that does."""
    tokenizer, random = make(), np.random.default_rng(8)
    config = GenerationConfig(stop_strings=("hello!", "END"))
    for _ in range(300):
        ids = random.integers(0, tokenizer.get_vocab_size(), 12).tolist()
        watch, decoder = StopWatch(config, (), IncrementalDecoder(tokenizer)), IncrementalDecoder(tokenizer)
        for token in ids:
            piece = watch.push(token)
            assert piece.num_decoded == len(decoder.push(token))
            if piece.stop_reason is not None:
                break
