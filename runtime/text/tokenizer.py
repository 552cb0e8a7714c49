"""Text to tokens and back, with `tokenizers` and jinja2 only: no transformers at run time."""

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError, ConfigError, GenerationError
from mirrorsd.runtime.text.shown_text import IncrementalDecoder
from mirrorsd.runtime.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from mirrorsd.runtime.text.chat_template import ChatTemplate

Message = Mapping[str, Any]
_LONG = 1 << 14
"""Characters that take tens of milliseconds: from here on `tokenizers` is asked in the way that frees the interpreter,
which `encode` does not. The other way starts threads."""
_FORM = 'expected a list like [{"role": "user", "content": "..."}]'


class BundleTokenizer:
    """The tokenizer and chat template of a bundle."""

    def __init__(self, bundle: Path) -> None:
        folder = bundle / names.TOKENIZER_FOLDER
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise BundleError(f"{folder / 'tokenizer.json'} cannot be read ({error}). Export again.") from error
        # Limits left over from training are not the model's: transformers ignores them too.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._token_bytes = TokenBytes(self._tokenizer)
        self._settings = _read_settings(folder)
        template = folder / "chat_template.jinja"
        self._template = _read_template(template) if template.is_file() else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain text, with the special tokens that the tokenizer adds by itself, or without.

        Raises:
            GenerationError: no text, an empty one, or half a surrogate pair in it, which is no character.
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
    ) -> list[int]:
        """Ids of a conversation through the model's chat template, ending where the assistant speaks.

        Content in parts, `[{"type": "text", "text": ...}, ...]`, becomes one text, a line or more for each part.

        Args:
            messages: who said what.
            tools: what the template is told of tools that the model may call; without any it hears of none.
            variables: further variables of the template, such as `{"enable_thinking": False}`.

        Raises:
            ConfigError: a variable that is not the caller's to set.
            GenerationError: no template, messages of another form, or the template refuses them.
        """
        if self._template is None:
            raise GenerationError("This bundle has no chat template: give a plain prompt instead of messages.")
        read, given = read_messages(messages), {**self._settings, "add_generation_prompt": True}
        taken = sorted({"messages", "tools", *given} & set(variables or {}))
        if taken:
            raise ConfigError(
                f"GenerationConfig.template_variables names {taken[0]!r}; allowed: any but "
                f"{', '.join(sorted({'messages', 'tools', *given}))}, which are set already."
            )
        given |= variables or {}
        text = self._template.render({**given, "messages": read, "tools": list(tools) or None})
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise GenerationError(
                f"The text is not Unicode: half a surrogate pair at character {error.start}. Decode the bytes it came "
                "from with errors='replace'."
            ) from error
        if len(text) < _LONG:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, special tokens left out or not."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for a stream of tokens that goes on after the ids `prompt`."""
        return IncrementalDecoder(self._tokenizer, prompt, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8: of a character split over tokens its own part.

        A special token is its own name. An id that the vocabulary does not have is nothing.
        """
        return self._token_bytes.of(token)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def to_json(self) -> str:
        """The whole tokenizer as `tokenizer.json` has it."""
        return str(self._tokenizer.to_str())


def _read_template(path: Path) -> "ChatTemplate":
    from mirrorsd.runtime.text.chat_template import ChatTemplate  # jinja2 is for models that have one

    return ChatTemplate(path)


def read_ids(token_ids: object, vocab_size: int, name: str = "token_ids") -> list[int]:
    """Check token ids: a list, tuple or one-dimensional array of whole numbers.

    Raises:
        GenerationError: something else, or an id that the vocabulary does not have.
    """
    is_list = isinstance(token_ids, list | tuple) or (isinstance(token_ids, np.ndarray) and token_ids.ndim == 1)
    if not is_list:
        raise GenerationError(
            f"{name} is {shortened(token_ids)}; allowed: a list of whole numbers. A text is given as prompt."
        )
    found: list[int] = []
    for place, token in enumerate(token_ids):  # type: ignore[arg-type, var-annotated]
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise GenerationError(f"{name}[{place}] is {token!r}; {name} must lie in 0 .. {vocab_size - 1}.")
        found.append(int(token))
    return found


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Check a conversation and bring it to the form of chat templates: every content is one text.

    An assistant's content may be missing or None beside its `tool_calls`. Other keys are the template's affair.

    Raises:
        GenerationError: another form: which message, what was found, what is expected.
    """
    if not isinstance(messages, list | tuple):
        raise GenerationError(f"messages is {shortened(messages)}; {_FORM}.")
    if not messages:
        raise GenerationError("The list of messages is empty: give at least one {'role': ..., 'content': ...}.")
    return [_read_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _read_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise GenerationError(f"{where} is {shortened(message)}; {_FORM}.")
    read = dict(message)
    if not isinstance(read.get("role"), str):
        raise GenerationError(f"{where} has the role {read.get('role')!r}; {_FORM}.")
    content = read.get("content")
    if isinstance(content, list | tuple):
        read["content"] = "\n".join(_read_part(part, f"{where}, part {place}") for place, part in enumerate(content))
    elif content is None and not read.get("tool_calls"):
        raise GenerationError(f"{where} has no content; only an assistant's with tool_calls may lack it; {_FORM}.")
    elif content is not None and not isinstance(content, str):
        raise GenerationError(
            f"{where} has the content {shortened(content)}; allowed: a text, or a list of text parts."
        )
    return read


def _read_part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise GenerationError(
        f'{where}, is {shortened(part)}; allowed: {{"type": "text", "text": "..."}}. Bundles read text only.'
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Variables that chat templates may use: special tokens by name.

    special_tokens_map.json counts, and wins, where tokenizer_config.json is of the older form without added tokens.
    """
    document = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in document:
        document |= _read_object(folder / "special_tokens_map.json")
    settings: dict[str, Any] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = document.get(name)
        settings[name] = value.get("content") if isinstance(value, dict) else value
    return {name: value for name, value in settings.items() if value is not None}


def _read_object(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
