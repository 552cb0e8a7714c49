"""A benchmark from its plan to its page: the settings of the folder, who takes part, the summary.

Owns: what the folder's settings say. Does not own: asking (`running`), arithmetic (`tables`), the page (`report`).
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrorsd.cli.bench import report
from mirrorsd.cli.bench.entrants import Entrant, OwnMethod
from mirrorsd.cli.bench.peers import Peer, PeerOption
from mirrorsd.cli.bench.running import Messages, Plan, Prompts, Report, ask_everybody, fitting, keep_settings
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs import names
from mirrorsd.graphs.folder_lock import FolderLock

if TYPE_CHECKING:
    from mirrorsd import MirrorPipeline

_LOCK = ".lock"


def measure(pipe: "MirrorPipeline", bundle: Path, plan: Plan, out: Path, show: Report) -> dict[str, Any]:
    """Ask what is still to be asked, write the summary and the page, and return the summary.

    Args:
        pipe: the bundle, loaded.
        bundle: its folder.
        plan: what is measured.
        out: where everything is kept.
        show: told what is done, and its share.

    Raises:
        ConfigError: `out` has answers that were measured otherwise, or is in use.
        ContextLengthError: no question fits.
        GenerationError: a peer ended, or did not answer.
    """
    lock = FolderLock(out / _LOCK, "benchmark")
    try:
        with ExitStack() as stack:
            own = [OwnMethod(pipe, name, plan.temperature, ignore_eos=plan.ignore_eos) for name in plan.methods]
            for method, run in product(own, range(plan.runs)):  # what is refused leaves nothing behind
                method.config(plan.max_tokens, plan.seed_of(run))
            peers = [start(stack, option, pipe, plan) for option in plan.peers]
            if peers:
                show("loading the peers", 0.0)
            versions = {peer.name: peer.wait_until_ready() for peer in peers}
            settings = settings_of(pipe, bundle, plan, versions)
            keep_settings(out, settings)
            entrants: list[Entrant] = [*own, *peers]
            prompts = Prompts(encode=encoder(pipe, is_raw=plan.is_raw), context=pipe.manifest.target.context)
            lines = ask_everybody(out, plan, entrants, prompts, show)
            left_out = len(plan.questions) - len(fitting(plan, prompts))
        found = report.summary(settings, lines, [entrant.name for entrant in own], left_out)
        report.write(out, found)
    finally:
        lock.release()
    return found


def start(stack: ExitStack, option: PeerOption, pipe: "MirrorPipeline", plan: Plan) -> Peer:
    """Start another runtime, to be ended with the stack."""
    ends = () if plan.ignore_eos else pipe.manifest.tokens.eos_ids
    room = pipe.manifest.target.context
    peer = Peer(option, pipe.tokenizer.decode, ends=ends, context=room, threads=plan.threads, drafted=plan.drafted)
    stack.callback(peer.close)
    return peer


def encoder(pipe: "MirrorPipeline", *, is_raw: bool) -> Callable[[Messages], list[int]]:
    """How a conversation becomes ids: by the chat template, or as a text that goes on after all that was said."""

    def encode(messages: Messages) -> list[int]:
        if is_raw:
            return pipe.tokenizer.encode("\n\n".join(message["content"] for message in messages))
        return pipe.tokenizer.encode_chat(messages)

    return encode


def settings_of(
    pipe: "MirrorPipeline", bundle: Path, plan: Plan, peer_versions: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """All that decides what is measured: two runs into one folder must agree in it."""
    texts = json.dumps([asdict(question) for question in plan.questions])
    found: dict[str, Any] = {
        "bundle": bundle.name,
        "manifest": sha256((bundle / names.MANIFEST_FILE).read_bytes()).hexdigest()[:16],
        "questions": [question.question_id for question in plan.questions],
        "texts": sha256(texts.encode()).hexdigest()[:16],
        "methods": list(plan.methods),
        "runs": plan.runs,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "max_tokens": plan.max_tokens,
        "ends": "ignored" if plan.ignore_eos else "honoured",
        "prompts": "raw" if plan.is_raw else "chat template",
        "device_map": pipe.device_map.name,
        "card_is_paced": pipe.device_map.pace is not None,
        "layout": pipe.layout,
        "speculation": asdict(pipe.sampled_speculation if plan.temperature else pipe.speculation),
    }
    if plan.peers:
        found["peers"] = [f"{option.name}: {option.model} {option.draft or ''}".strip() for option in plan.peers]
        found |= {"drafted_by_peers": plan.drafted, "threads_of_peers": plan.threads}
    versions = installed_versions()
    for name, of_peer in peer_versions.items():
        versions |= {f"{name}: {package}": number for package, number in of_peer.items()}
    return found | {"machine": describe_machine(), "versions": versions}
