"""A bundle's chat template, in the sandbox and with the helpers that transformers gives it."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mirrorsd.graphs.errors import BundleError, GenerationError

_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
)
"""What a template may raise: it is a program that came with the checkpoint."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, path: Path) -> None:
        """Read and compile it.

        Raises:
            BundleError: the file is no template.
        """
        self._template = _compile(path)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The conversation that the variables hold, as one text.

        Raises:
            GenerationError: the template refuses them.
        """
        try:
            return self._template.render(variables)
        except _TEMPLATE_ERRORS as error:
            raise GenerationError(f"The chat template refused the messages: {error}") from error


class GenerationBlocks(Extension):
    """`{% generation %}`, which marks what the assistant says for training; here its content is simply written."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an attribute of instances

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(path: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} cannot be read ({error}). Export again.") from error


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
