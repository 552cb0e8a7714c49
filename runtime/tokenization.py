"""Text to tokens and back, with `tokenizers` and jinja2 only: no transformers at run time."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError, GenerationError
from mirrorsd.runtime.incremental_decoder import IncrementalDecoder

Message = Mapping[str, Any]


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
        self._settings = _read_settings(folder)
        template = folder / "chat_template.jinja"
        self._template = _compile(template.read_text(encoding="utf-8")) if template.is_file() else None

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with the special tokens that the tokenizer adds by itself.

        Raises:
            GenerationError: the text holds half a surrogate pair, which is no character.
        """
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation through the model's chat template, ending where the assistant speaks.

        Raises:
            GenerationError: no template, no message, the template refuses the messages, or a text is none.
        """
        if self._template is None:
            raise GenerationError("This bundle has no chat template: give a plain prompt instead of messages.")
        if not messages:
            raise GenerationError("The list of messages is empty: give at least one {'role': ..., 'content': ...}.")
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._settings
            )
        except jinja2.TemplateError as error:
            raise GenerationError(f"The chat template refused the messages: {error}") from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise GenerationError(
                f"The text is not Unicode: half a surrogate pair at character {error.start}. Decode the bytes it came "
                "from with errors='replace'."
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def decoder(self, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder for a stream of tokens that goes on after the ids `prompt`."""
        return IncrementalDecoder(self._tokenizer, prompt)


class GenerationBlocks(Extension):
    """`{% generation %}`, which marks what the assistant says for training; here its content is simply written."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an attribute of instances

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


def _compile(source: str) -> jinja2.Template:
    """A template in the sandbox and with the helpers that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
