"""`mirrorsd chat`: a conversation on the terminal, with a bundle or with a running server."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mirrorsd.cli.commands.loading import open_pipeline
from mirrorsd.cli.input import options
from mirrorsd.cli.input.requests import checked_text
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd.cli.chat.answers import Answers


def chat(
    context: typer.Context,
    bundle: options.MaybeBundle = None,
    url: Annotated[str | None, typer.Option(help="Talk to a running `mirrorsd serve` instead.")] = None,
    model: Annotated[str | None, typer.Option(help="Which of the server's models.")] = None,
    system: Annotated[str, typer.Option(help="What the model is told before everything.")] = "",
    method: options.Method = "auto",
    device_map: options.DeviceMapName = "auto",
    layout: options.Layout = None,
    max_new_tokens: options.MaxNewTokens = 1024,
    temperature: options.Temperature = None,
    greedy: options.Greedy = False,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
) -> None:
    """Talk with a chat model; `/help` lists the commands. In a pipe, every line is a question."""
    checked_text(system, "--system")
    if url is not None:
        options.refuse_beside("with --url, whose server has its own", context, "device_map", "layout")
    from mirrorsd import GenerationConfig
    from mirrorsd.cli.chat.chat import Chat
    from mirrorsd.cli.chat.lines import edited_lines, piped_lines
    from mirrorsd.cli.chat.screen import PipeScreen, TerminalScreen, is_interactive
    from mirrorsd.cli.chat.slash import WORDS, converse

    config = GenerationConfig(
        method=options.checked_method(method),
        max_new_tokens=max_new_tokens,
        **options.decoding(temperature, greedy=greedy),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_strings=tuple(stop or ()),
    )
    with open_answers(bundle, url, model, device_map, layout) as answers:
        answers.check_method(method)
        answers.num_tokens([{"role": "user", "content": "Hello"}])  # a model without a chat template says so now
        is_patient = is_interactive()
        screen = TerminalScreen() if is_patient else PipeScreen()
        conversation = Chat(answers, config, screen, system)
        if is_patient:
            screen.say(f"{answers.name}, {answers.context} tokens of context. /help lists commands, Ctrl-D ends.")
            converse(conversation, edited_lines(WORDS, lambda: conversation.toolbar), is_patient=True)
        else:
            converse(conversation, piped_lines(), is_patient=False)


def open_answers(
    bundle: Path | None, url: str | None, model: str | None, device_map: str, layout: str | None
) -> "AbstractContextManager[Answers]":
    """Whoever answers; a bundle is released at the end.

    Raises:
        ConfigError: neither a bundle nor a URL, or both.
    """
    if (bundle is None) == (url is None):
        raise ConfigError("Give either BUNDLE or --url http://127.0.0.1:8600 of a running `mirrorsd serve`.")
    if url is not None:
        from mirrorsd.cli.chat.over_http import OverHttp

        return nullcontext(OverHttp(url, os.environ.get(options.KEY_VARIABLE), model))
    if model is not None:
        raise ConfigError("--model names one of a server's models; a bundle is one model.")
    assert bundle is not None
    return _in_process(bundle, device_map, layout)


@contextmanager
def _in_process(bundle: Path, device_map: str, layout: str | None) -> Iterator["Answers"]:
    from mirrorsd.cli.chat.in_process import InProcess

    with open_pipeline(bundle, device_map, {}, layout) as pipe:
        yield InProcess(pipe, bundle)
