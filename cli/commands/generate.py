"""`mirrorsd generate`: one text, streamed to the terminal or as JSON."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mirrorsd.cli.commands.loading import note_placement, open_pipeline
from mirrorsd.cli.input import options
from mirrorsd.cli.input.requests import Request, read_request
from mirrorsd.cli.output.console import note, print_json
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline


def generate(
    bundle: options.Bundle,
    prompt: Annotated[str | None, typer.Argument(help="Text to go on with; without it, stdin is read.")] = None,
    messages: Annotated[Path | None, typer.Option(help="JSON file with a conversation to answer.")] = None,
    is_chat: Annotated[
        bool, typer.Option("--chat", help="PROMPT is a message to answer, not text to go on with.")
    ] = False,
    method: options.Method = "auto",
    device_map: options.DeviceMapName = "auto",
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
    gamma: options.Gamma = None,
    roots: options.Roots = None,
    root_source: options.RootSource = None,
    allocation: options.Allocation = None,
    passes: options.Passes = None,
    window: options.Window = None,
    exits: options.Exits = None,
    pad_rows_to: options.PadRowsTo = None,
    layout: options.Layout = None,
    trace: Annotated[Path | None, typer.Option(help="Write what each device did when, as a Chrome trace.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Generate one text. The method and the speed options never change it."""
    from mirrorsd import GenerationConfig

    request = read_request(prompt, messages, is_chat=is_chat)
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
        ignore_eos=ignore_eos,
    )
    roots_settings = {"roots": roots, "root_source": root_source, "allocation": allocation}
    speed = {"gamma": gamma, "passes": passes, "window": window, "pad_rows_to": pad_rows_to, **roots_settings}
    with open_pipeline(bundle, device_map, {**speed, "exits": options.read_exits(exits)}, layout) as pipe:
        if as_json:
            result = pipe.generate(request.prompt, config, messages=request.messages)
            print_json(result_document(result, pipe.device_map.name))
        else:
            note_placement(pipe)
            result = stream_to_terminal(pipe, request, config)
            note_summary(result)
    if trace is not None:
        save_trace(result, trace)


def stream_to_terminal(pipe: "MirrorPipeline", request: Request, config: "GenerationConfig") -> "GenerationResult":
    """Print the text as it is decided and return the result that the last chunk carries."""
    for chunk in pipe.stream(request.prompt, config, messages=request.messages):
        print(chunk.text, end="", flush=True)
        if chunk.result is not None:
            result = chunk.result
    print()
    sys.stdout.flush()
    return result


def result_document(result: "GenerationResult", device_map: str) -> dict[str, Any]:
    """The object of `generate --json`."""
    stats = result.stats.to_dict()
    times = ("seconds", "prefill_ms", "time_to_first_token_ms", "tokens_per_second")
    fields = ("steps", "tokens_per_step", "mean_accepted", "reuse_rate", "reuse_by_source")
    more_fields = ("draft_exposed_ms", "overlap", "step_ms", "near_ties")
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "num_tokens": len(result.token_ids),
        "num_prompt_tokens": stats["num_prompt_tokens"],
        "num_reused_tokens": stats["num_reused_tokens"],
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "method": result.method,
        "device_map": device_map,
        "layout": result.layout,
        **{name: stats[name] for name in times},
        "stats": {name: stats[name] for name in (*fields, *more_fields)},
        "warnings": stats["warnings"],
    }


def note_summary(result: "GenerationResult") -> None:
    """One line about the speed and the seed, and what went wrong without changing the text."""
    stats = result.stats
    seed = "" if result.seed is None else f", seed {result.seed}"
    note(
        f"{len(result.token_ids)} tokens by {result.method} decoding in {stats.seconds:.2f} s: "
        f"{stats.tokens_per_second:.1f} tokens/s, {stats.tokens_per_step:.2f} tokens per step{seed}; the prompt's "
        f"{stats.num_prompt_tokens} tokens took {stats.prefill_ms:.0f} ms, the first token came after "
        f"{stats.time_to_first_token_ms:.0f} ms"
    )
    for warning in stats.warnings:
        note(f"warning: {warning}")


def save_trace(result: "GenerationResult", path: Path) -> None:
    """Write the trace.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        result.write_trace(path)
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be written: {error.strerror}.") from error
