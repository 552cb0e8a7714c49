"""Tokens to text as they come: what is shown adds up to the decoding of the whole, whatever the tokens are.

A token's text may depend on its neighbours in three ways, and nothing is shown before they are known:

* The first token of a text may lose its leading space. Every later one is decoded behind an *anchor*, a token that was
  decoded before it; at the beginning that is one of the prompt.
* Byte-level tokens are bytes: one character may need several. What ends in a replacement character may go on.
* Byte-fallback decoders (`<0x0A>`; Llama 2, Mistral, Gemma, Phi-3) take a run of byte tokens as a whole: one byte that
  fits nowhere turns every character of its run into replacement characters. A run waits for the token that ends it, so
  that a newline made of a byte comes one token late: shown at once, it might have to be taken back.

And when a text is over: end-of-sequence ids, stop strings, the token limit.
"""

import re
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer

from mirrorsd.texts.config import GenerationConfig

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 8
_MOST_PARTS = 4
"""Bytes of a character, so the most tokens that one is split over."""


class TokenDecoder(Protocol):
    """Turns the tokens of a stream into text.

    Attributes:
        mark: what is shown behind the last piece of text, though no token says it.
    """

    mark: str

    def push(self, token: int) -> str:
        """The text that is certain with this token."""

    def finish(self) -> str:
        """What is left at the end."""


class IncrementalDecoder:
    """Turns tokens into text, piece by piece, in time proportional to their number."""

    mark = ""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        decode = tokenizer.decoder.decode if tokenizer.decoder is not None else " ".join
        self._has_byte_runs = decode(["<0x0A>"]) == "\n"
        self._has_split_characters = decode(["Ã", "©"]) == "é"
        added = tokenizer.get_added_tokens_decoder() if skip_special_tokens else {}
        self._special = {token for token, content in added.items() if content.special}
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._held: list[int] = []
        self._shown = ""  # of what anchor and held tokens say
        self._start_after(prompt)

    def push(self, token: int) -> str:
        """The text that is certain with this token: often empty for a part of a character, or a byte."""
        written = self._written(token)
        if not written:
            return ""
        self._held.append(token)
        if self._is_byte(written):
            return ""
        text = self._decode([*self._anchor, *self._held])
        if self._has_split_characters and text.endswith(_REPLACEMENT):
            return self._settle_older(text) if len(self._held) >= _MOST_HELD else ""
        piece = self._unseen(text)
        self._restart(self._held, [])
        return piece

    def finish(self) -> str:
        """What is left at the end: an unfinished run of bytes or character, as the tokenizer shows it."""
        piece = self._unseen(self._decode([*self._anchor, *self._held]))
        self._restart(self._held, [])
        return piece

    def _start_after(self, prompt: Sequence[int]) -> None:
        """Anchor on the prompt's last token with text; its last character is gone on with, where it is unfinished."""
        ids, tail = [int(token) for token in prompt], 0
        for place in range(len(ids) - 1, -1, -1):
            if self._stands_alone(ids[place]):
                self._anchor, tail = [ids[place]], place + 1
                break
        if not tail and any(map(self._written, ids)):  # bytes alone: what follows is not the first, behind any token
            others = range(self._tokenizer.get_vocab_size())
            self._anchor = list(islice(filter(self._stands_alone, others), 1))
        unfinished = [token for token in ids[tail:] if self._written(token)]
        if self._decode([*self._anchor, *unfinished]).endswith(_REPLACEMENT):
            self._held = unfinished
        self._anchor_text = self._decode(self._anchor)
        self._shown = self._decode([*self._anchor, *self._held])

    def _stands_alone(self, token: int) -> bool:
        """Whether it has a text that no neighbour changes."""
        written, text = self._written(token), self._decode([token])
        is_part = self._has_split_characters and _REPLACEMENT in text
        return bool(written and text) and not is_part and not self._is_byte(written or "")

    def _settle_older(self, text: str) -> str:
        """Show the older ones of many held tokens: those before a place where nothing that comes can join both sides.

        Bytes before and after such a place say apart what they say together. Were the bytes after it part of a
        character begun before it, they would say one replacement character more on their own.
        """
        for count in range(len(self._held) - _MOST_PARTS, len(self._held) - 2 * _MOST_PARTS, -1):
            older, younger = self._held[:count], self._held[count:]
            head, before = self._decode([*self._anchor, *older]), self._decode(older[-1:])
            both = self._decode([*older[-1:], *younger])
            if both.startswith(before) and head + both[len(before) :] == text:
                piece = self._unseen(head)
                self._restart(older, younger)
                return piece
        return ""

    def _restart(self, settled: list[int], held: list[int]) -> None:
        """Go on behind the last settled token that has a text of its own; behind any, as long as none had."""
        text = self._decode(settled[-1:]) if settled else ""
        if settled and (text or not self._anchor_text):
            self._anchor, self._anchor_text = settled[-1:], text
        self._held = held
        self._shown = self._anchor_text

    def _unseen(self, text: str) -> str:
        """What `text` has behind that which it shares with what is shown: the rest of it, as a rule."""
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        pairs = enumerate(zip(self._shown, text, strict=False))
        return text[next((place for place, (old, new) in pairs if old != new), len(text)) :]

    def _written(self, token: int) -> str | None:
        """How the vocabulary writes the token; nothing for those that no text shows."""
        return None if token in self._special else self._tokenizer.id_to_token(token)

    def _is_byte(self, written: str) -> bool:
        return self._has_byte_runs and BYTE_TOKEN.fullmatch(written) is not None

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skips_special))


class Piece(NamedTuple):
    """Text that may be shown now; `stop_reason` is set with the last one: see `GenerationResult`.

    The token itself decoded to `num_decoded` characters, whether they are shown already or held back.
    """

    text: str
    stop_reason: str | None
    num_decoded: int = 0


class StopWatch:
    """Follows the produced tokens of one request, holds back text that may turn out to be a stop string."""

    def __init__(self, config: GenerationConfig, eos_ids: tuple[int, ...], decoder: TokenDecoder) -> None:
        self._eos_ids = frozenset() if config.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(config.stop_token_ids)
        self._stop_strings = config.stop_strings
        self._decoder = decoder
        self._held = ""

    def push(self, token: int) -> Piece:
        """Take the next token and say what may be shown and whether the text is over."""
        if token in self._eos_ids:
            return self.finish("eos")
        decoded = self._decoder.push(token)
        self._held += decoded
        cut = self._first_stop_string()
        if cut is not None:
            return self._end(self._held[:cut], "stop_string", len(decoded))
        if token in self._stop_ids:
            return self.finish("stop_token")._replace(num_decoded=len(decoded))
        if self._decoder.mark:  # which no stop string is looked for in
            shown, self._held = self._held + self._decoder.mark, ""
            return Piece(shown, None, len(decoded) + len(self._decoder.mark))
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return Piece(shown, None, len(decoded))

    def finish(self, reason: str) -> Piece:
        """All text still held back; `stop_string` comes before `reason` where the decoder held one back."""
        self._held += self._decoder.finish()
        cut = self._first_stop_string()
        whole = self._held + self._decoder.mark
        return self._end(whole, reason) if cut is None else self._end(self._held[:cut], "stop_string")

    def _end(self, shown: str, reason: str, num_decoded: int = 0) -> Piece:
        self._held = ""
        return Piece(shown, reason, num_decoded)

    def _first_stop_string(self) -> int | None:
        places = [self._held.find(stop) for stop in self._stop_strings]
        return min((place for place in places if place >= 0), default=None)

    def _possible_start(self) -> int:
        """Length of the longest tail that begins a stop string.

        With stop string `"END"` and held text `"... E"` one character waits.
        """
        longest = 0
        for stop in self._stop_strings:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
