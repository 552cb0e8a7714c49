"""The bytes of single tokens: together they are the text's, whatever kind the vocabulary is."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.texts.tokenizer import TokenBytes

TEXT = "A caf\u00e9, \U0001f98a and \u65e5\u672c \n\t end"


def byte_level() -> Tokenizer:
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<\u00e9nd>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581a": 256, "n": 257, "<unk>": 258, "\u2581": 259}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_bytes_of_byte_level_tokens_are_the_text_s() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT).ids
    assert b"".join(map(TokenBytes(tokenizer).of, ids)) == TEXT.encode()
    assert TokenBytes(tokenizer).of(tokenizer.token_to_id("<\u00e9nd>")) == "<\u00e9nd>".encode()


def test_bytes_of_tokens_with_byte_fallback_are_the_text_s() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode(TEXT).ids
    assert b"".join(map(TokenBytes(tokenizer).of, ids)) == TEXT.encode()


def test_added_tokens_that_are_text_are_what_the_decoder_makes_of_them() -> None:
    """Gemma's runs of spaces are added, and not special."""
    for tokenizer, written, text in ((byte_fallback(), "\u2581\u2581", "  "), (byte_level(), "\u0120x", " x")):
        tokenizer.add_tokens([AddedToken(written, special=False, normalized=False)])
        token = tokenizer.token_to_id(written)
        assert TokenBytes(tokenizer).of(token).decode() == text == tokenizer.decode([0, token])[-len(text) :]
    tokenizer = byte_level()
    tokenizer.add_tokens(["\u65e5"])
    assert TokenBytes(tokenizer).of(tokenizer.token_to_id("\u65e5")).decode() == "\u65e5", "no character for bytes"


def test_an_id_that_the_vocabulary_lacks_is_nothing() -> None:
    assert TokenBytes(byte_level()).of(5000) == TokenBytes(byte_level()).of(-1) == b""
