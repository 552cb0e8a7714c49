"""Text to tokens and back, with `tokenizers` and jinja2 only: no transformers at run time.

Owns, besides, the bytes that single tokens add to a text (`TokenBytes`).
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError, ConfigError, GenerationError
from mirrorsd.texts.channels import ChannelDecoder, has_channels
from mirrorsd.texts.messages import Message, plain_value, read_messages
from mirrorsd.texts.setting_rules import shown
from mirrorsd.texts.shown_text import BYTE_TOKEN, IncrementalDecoder, TokenDecoder

if TYPE_CHECKING:
    from mirrorsd.texts.chat_template import ChatTemplate

_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_LONG = 1 << 14
"""Characters that take tens of milliseconds: from here on `tokenizers` is asked in the way that frees the interpreter,
which `encode` does not. The other way starts threads."""


class BundleTokenizer:
    """The tokenizer and chat templates of a bundle.

    Attributes:
        chat_templates: the templates' sources by name; "default" is used unless tools are given and there is a
            "tool_use". Empty without any.
    """

    def __init__(self, bundle: Path, num_ids: int | None = None) -> None:
        """Read them.

        Args:
            bundle: its folder.
            num_ids: how many ids the model has; a tokenizer may know more. None checks nothing.

        Raises:
            BundleError: a file cannot be read.
        """
        self._bundle, folder = bundle, bundle / names.TOKENIZER_FOLDER
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise BundleError(f"{folder / 'tokenizer.json'} cannot be read ({error}). Export again.") from error
        # Limits left over from training are not the model's: transformers ignores them too.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._token_bytes = TokenBytes(self._tokenizer)
        settings = _read_settings(folder)
        self._tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
        self._named_tokens, self._num_ids = _read_named_tokens(settings), num_ids
        files = _template_files(folder)
        self._template = _read_templates(files) if files else None
        self.chat_templates: Mapping[str, str] = self._template.texts if self._template else {}

    def __reduce__(self) -> tuple[type[Self], tuple[Path, int | None]]:
        """Another process reads it anew."""
        return type(self), (self._bundle, self._num_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain text, with the special tokens that the tokenizer adds by itself, or without.

        Raises:
            GenerationError: no text, an empty one, half a surrogate pair in it, which is no character, or a token that
                the model does not have.
        """
        if not isinstance(text, str):
            raise GenerationError(
                f"prompt is {shortened(text)}; allowed: a text. Give ids as token_ids, a chat as messages."
            )
        if not text:
            raise GenerationError("The prompt is empty: give at least one character of text, or a message.")
        return self._ids(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Ids of a conversation through the model's chat template: see `render_chat`.

        Raises:
            ConfigError: see `render_chat`.
            GenerationError: see `render_chat`; or the text holds a token that the model does not have.
        """
        text = self.render_chat(
            messages,
            tools,
            variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._ids(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """A conversation as the model's chat template writes it, as transformers' `apply_chat_template` does.

        Content in parts, `[{"type": "text", "text": ...}, ...]`, reaches a template that writes every part; for others
        it becomes one text, a line or more for each part. Arguments of calls reach it as objects.

        Args:
            messages: who said what.
            tools: what the template is told of tools that the model may call; without any it hears of none.
            variables: further variables of the template, such as `{"enable_thinking": False}` or `documents`. They
                replace special tokens of the same name; `chat_template` names one of several templates.
            add_generation_prompt: end where the assistant speaks.
            continue_final_message: end within the last message instead, for the model to go on with.

        Raises:
            ConfigError: a variable that is not the caller's to set, or no template has the name.
            GenerationError: no template, messages of another form, or the template refuses them.
        """
        if self._template is None:
            raise GenerationError("This bundle has no chat template: give a plain prompt instead of messages.")
        given = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "messages": None,
            "tools": plain_value(list(tools), "tools") or None,
        }
        more = plain_value(dict(variables or {}), "template_variables")
        taken = sorted(set(given) & set(more))
        if taken:
            raise ConfigError(
                f"GenerationConfig.template_variables names {taken[0]!r}; allowed: any but "
                f"{', '.join(sorted(given))}, which are set already."
            )
        told = {**self._named_tokens, "documents": None, **more, **given}
        return self._template.render(read_messages(messages), told, is_continued=continue_final_message)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise GenerationError(
                f"The text is not Unicode: half a surrogate pair at character {error.start}. Decode the bytes it came "
                "from with errors='replace'."
            ) from error
        if len(text) < _LONG:
            read = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            read = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids = list(read.ids)
        if self._num_ids is not None and ids and max(ids) >= self._num_ids:
            outside = next(token for token in ids if token >= self._num_ids)
            raise GenerationError(
                f"The text holds {self._tokenizer.id_to_token(outside)!r}, which the tokenizer knows as id {outside} "
                f"and the model does not: its ids are 0 to {self._num_ids - 1}. Leave it out."
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, special tokens left out or not.

        Raises:
            GenerationError: no list of ids.
        """
        ids = read_ids(ids, 1 << 32, "ids")
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> TokenDecoder:
        """A decoder for a stream of tokens that goes on after the ids `prompt`."""
        begin = partial(IncrementalDecoder, self._tokenizer, skip_special_tokens=skip_special_tokens)
        special_tokens = self.special_tokens if skip_special_tokens else {}
        return ChannelDecoder(begin, special_tokens, prompt) if has_channels(special_tokens) else begin(prompt)

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8: of a character split over tokens its own part.

        A special token is its own name. An id that the vocabulary does not have is nothing.
        """
        return self._token_bytes.of(token)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens by their text: those that are left out of what is shown."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {content.content: token for token, content in added.items() if content.special}

    def to_json(self) -> str:
        """The whole tokenizer as `tokenizer.json` has it."""
        return str(self._tokenizer.to_str())


def _template_files(folder: Path) -> dict[str, Path]:
    """The chat templates in the tokenizer's folder by name."""
    before, behind = names.NAMED_TEMPLATE_FILE.split("{}")
    found = {
        path.name.removeprefix(before).removesuffix(behind): path for path in sorted(folder.glob(f"{before}*{behind}"))
    }
    default = folder / names.CHAT_TEMPLATE_FILE
    return {names.DEFAULT_TEMPLATE: default, **found} if default.is_file() else found


def _read_templates(files: Mapping[str, Path]) -> "ChatTemplate":
    from mirrorsd.texts.chat_template import ChatTemplate  # jinja2 is for models that have one

    return ChatTemplate(files)


def read_ids(token_ids: object, vocab_size: int, name: str = "token_ids") -> list[int]:
    """Check token ids: a list, tuple, range or one-dimensional array of whole numbers.

    Raises:
        GenerationError: something else, or an id that the vocabulary does not have.
    """
    is_list = isinstance(token_ids, list | tuple | range) or (isinstance(token_ids, np.ndarray) and token_ids.ndim == 1)
    if not is_list:
        raise GenerationError(
            f"{name} is {shortened(token_ids)}; allowed: a list of whole numbers. A text is given as prompt."
        )
    found: list[int] = []
    for place, token in enumerate(token_ids):  # type: ignore[arg-type, var-annotated]
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise GenerationError(f"{name}[{place}] is {shown(token)}; {name} must lie in 0 .. {vocab_size - 1}.")
        found.append(int(token))
    return found


def _read_named_tokens(document: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that chat templates know them by: `bos_token`, and whatever a model adds."""
    found = {name: value for name, value in document.items() if name.endswith("_token")}
    for name in ("model_specific_special_tokens", "extra_special_tokens"):
        more = document.get(name)
        found |= more if isinstance(more, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_settings(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says.

    special_tokens_map.json counts, and wins, where that file is of the older form without added tokens.
    """
    document = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in document:
        document |= _read_object(folder / "special_tokens_map.json")
    return document


def _read_object(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


class TokenBytes:
    """Looks up what a vocabulary's entries stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token: int) -> bytes:
        """The token's bytes; none for an id that the vocabulary does not have."""
        written = self._tokenizer.id_to_token(token) if token >= 0 else None
        if written is None:
            return b""
        if token in self._special:
            return written.encode()
        if self._is_byte_level:
            found = [self._alphabet.get(character, -1) for character in written]
            return written.encode() if -1 in found else bytes(found)
        if BYTE_TOKEN.fullmatch(written):
            return bytes([int(written[3:5], 16)])
        return written.replace(_METASPACE, " ").encode()

    @cached_property
    def _special(self) -> frozenset[int]:
        """Added tokens that are no text; others (Gemma's runs of spaces) are decoded as what the model has learned."""
        return frozenset(token for token, one in self._tokenizer.get_added_tokens_decoder().items() if one.special)

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
