"""The bytes that single tokens add to a text: what a program needs that shows tokens one by one."""

from functools import cached_property

from tokenizers import Tokenizer, pre_tokenizers

from mirrorsd.runtime.text.shown_text import BYTE_TOKEN

_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    """Looks up what a vocabulary's entries stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token: int) -> bytes:
        """The token's bytes; none for an id that the vocabulary does not have."""
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._added:
            return written.encode()
        if self._is_byte_level:
            return bytes(self._alphabet.get(character, ord("?")) for character in written)
        if BYTE_TOKEN.fullmatch(written):
            return bytes([int(written[3:5], 16)])
        return written.replace(_METASPACE, " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._tokenizer.decoder
        return decoder is not None and bool(decoder.decode(["\u00c3", "\u00a9"]) == "\u00e9")

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """Bytes by the characters that byte-level vocabularies write them as: their own where those can be seen."""
        shown = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
        hidden = [byte for byte in range(256) if byte not in set(shown)]
        written = [chr(byte) for byte in shown] + [chr(256 + place) for place in range(len(hidden))]
        assert set(written) == set(pre_tokenizers.ByteLevel.alphabet())
        return dict(zip(written, shown + hidden, strict=True))
