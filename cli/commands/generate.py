"""`mirrorsd generate`: one text, streamed to the terminal or as JSON."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mirrorsd.cli.commands.loading import check_fits, open_pipeline
from mirrorsd.cli.input import options
from mirrorsd.cli.input.requests import Request, check_writable, has_chat_template, read_request
from mirrorsd.cli.output.console import as_word, note, print_json, visible
from mirrorsd.cli.output.failures import as_typed
from mirrorsd.cli.output.leaving import end_on_ctrl_c
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline


_OF_ONE_TEXT = ("is_raw", "max_new_tokens", "ignore_eos", "settings", "trace", "verbose")


def generate(
    context: typer.Context,
    bundle: options.Bundle,
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; without it stdin is read, and a terminal opens the chat.")
    ] = None,
    messages: Annotated[Path | None, typer.Option(help="JSON file with a conversation to answer.")] = None,
    is_raw: options.Raw = False,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = None,
    greedy: options.Greedy = False,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    method: options.Method = "auto",
    device_map: options.DeviceMapName = "auto",
    layout: options.Layout = None,
    settings: options.Settings = None,
    trace: Annotated[Path | None, typer.Option(help="Write what each device did when, as a Chrome trace.")] = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Answer a prompt, or go on with it where the model has no chat template. No option for speed changes the text."""
    asked: dict[str, Any] = {"temperature": temperature, "greedy": greedy, "top_k": top_k, "top_p": top_p}
    asked |= {"min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop}
    if prompt is None and messages is None and sys.stdin.isatty() and not as_json:
        options.refuse_beside("in the chat that a missing PROMPT opens", context, *_OF_ONE_TEXT)
        open_chat(context, bundle, method=method, device_map=device_map, layout=layout, **asked)
        return
    if messages is not None:
        options.refuse_beside("with --messages, which the chat template writes", context, "is_raw")
    end_on_ctrl_c()
    check_writable("--trace", trace)
    request = read_request(prompt, messages, is_chat=not is_raw and has_chat_template(bundle))
    config = options.text_config(asked, method=method, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    speed = options.read_settings(settings)
    check_fits(bundle, request)
    with open_pipeline(bundle, device_map, speed, layout, is_verbose=verbose) as pipe:
        if request.messages is not None:
            config = config.resolve(pipe.manifest.chat_settings(config.temperature))
        if as_json:
            result = pipe.generate(request.prompt, config, messages=request.messages)
            print_json(result_document(result, pipe.device_map.name))
        else:
            result = stream_to_terminal(pipe, request, config)
            note_summary(result)
    if trace is not None:
        save_trace(result, trace)


def open_chat(context: typer.Context, bundle: Path, **asked: Any) -> None:
    """Talk with the model instead, with the options that were asked for: what a missing prompt means on a terminal.

    Raises:
        ConfigError: the bundle has no chat template, or this installation has no chat.
    """
    if not has_chat_template(bundle) and bundle.is_dir():
        raise ConfigError("No prompt. This model has no chat template: give it a text to go on with as PROMPT.")
    try:
        command = import_module("mirrorsd.cli.commands.chat")
    except ModuleNotFoundError as error:
        raise ConfigError(f"No prompt. Give PROMPT, or open a conversation: mirrorsd chat {as_word(bundle)}") from error
    command.chat(context, bundle, **asked)


def stream_to_terminal(pipe: "MirrorPipeline", request: Request, config: "GenerationConfig") -> "GenerationResult":
    """Print the text as it is decided and return the result that the last chunk carries."""
    shown = visible if sys.stdout.isatty() else str  # what a model says must not steer a terminal
    for chunk in pipe.stream(request.prompt, config, messages=request.messages):
        print(shown(chunk.text), end="", flush=True)
        if chunk.result is not None:
            result = chunk.result
    print()
    sys.stdout.flush()
    return result


def result_document(result: "GenerationResult", device_map: str) -> dict[str, Any]:
    """The object of `generate --json`."""
    stats = result.stats.to_dict()
    counts = ("num_prompt_tokens", "num_reused_tokens")
    times = ("seconds", "prefill_ms", "time_to_first_token_ms", "tokens_per_second")
    against_plain = ("plain_tokens_per_second", "times_plain")
    fields = ("steps", "tokens_per_step", "mean_accepted", "num_drafted", "draft_right", "reuse_rate")
    more_fields = ("reuse_by_source", "draft_exposed_ms", "overlap", "step_ms", "near_ties")
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "num_tokens": len(result.token_ids),
        **{name: stats[name] for name in counts},
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "method": result.method,
        "device_map": device_map,
        "layout": result.layout,
        **{name: stats[name] for name in (*times, *against_plain)},
        "stats": {name: stats[name] for name in (*fields, *more_fields)},
        "warnings": stats["warnings"],
    }


def note_summary(result: "GenerationResult") -> None:
    """One line about the speed and the seed, and what went wrong without changing the text."""
    seed = "" if result.seed is None else f" | seed {result.seed}"
    note(f"{result.stats}{seed}".replace("max_new_tokens", "--max-new-tokens"), "dim")
    for warning in result.stats.warnings:
        note(f"warning: {as_typed(warning)}", "yellow")


def save_trace(result: "GenerationResult", path: Path) -> None:
    """Write the trace.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        result.write_trace(path)
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be written: {error.strerror}.") from error
