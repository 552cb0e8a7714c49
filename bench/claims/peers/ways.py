"""Who takes part in a comparison with other runtimes: a runtime, its model, and how it decodes.

Owns: the list, by the names that `prepare.py` gave the peers' exports. Does not own: processes and turns (`turns.py`).
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from mirrorsd.cli.bench.llama_server import find_server
from mirrorsd.cli.bench.peers import LLAMA_CPP
from mirrorsd.graphs.bundle_files import read_bundle

PEERS = ("openvino-genai", "onnxruntime-genai")
LONGEST_NGRAM = 3
"""Of looking up: openvino-genai's own choice, and llama.cpp's here, whose own is 12."""
Entry = dict[str, Any]


def entries(options: Namespace) -> list[Entry]:
    """Who takes part. In fp32 OpenVINO is kept from bfloat16, its own choice on processors that have it.

    openvino-genai decodes plainly in both of its ways: with pages of a cache, its own choice, and without.
    """
    exports = exports_in(options.cache)
    hint = hint_of(options.precision)
    own: dict[str, Entry] = {"openvino-genai": hint, "onnxruntime-genai": {}}
    whole = f"{options.target}-{options.precision}"
    methods = ("plain", "lookup", "serial", "auto") if options.draft else ("plain", "lookup", "auto")
    ours = {"device_map": options.device_map}
    found = [entry("mirrorsd", name, options.bundle, ours, {"method": name}) for name in methods]
    found += [entry(peer, "plain", exports[peer] / whole, own[peer], {}) for peer in PEERS]
    alone = hint | {"ATTENTION_BACKEND": "SDPA"}
    found.append(entry("openvino-genai", "plain, SDPA", exports["openvino-genai"] / whole, alone, {}))
    kinds = (options.draft_precisions or options.precision).split(",")
    for count in counts(options):
        drafted = {"num_drafted": count}
        looked_up = drafted | {"longest_ngram": LONGEST_NGRAM}
        target, by_text = exports["openvino-genai"] / whole, hint | {"prompt_lookup": True}
        found.append(entry("openvino-genai", f"prompt lookup {count}", target, by_text, looked_up))
        if not options.draft:
            continue
        for kind in kinds:
            small = exports["openvino-genai"] / f"{options.draft}-{kind}"
            name = f"draft {count}" + (f" in {kind}" if len(kinds) > 1 else "")
            found.append(entry("openvino-genai", name, target, hint, drafted, small))
        composite = exports["onnxruntime-genai"] / f"{whole}+{options.draft}"
        found.append(entry("onnxruntime-genai", f"draft {count}", composite, {}, drafted))
    return found + (entries_of_llama_cpp(options) if options.llama_cpp else [])


def entries_of_llama_cpp(options: Namespace) -> list[Entry]:
    """Its ways to decode: what it drafts with is settled as its server starts, so each has a process of its own."""
    whole, server = file_of(options, options.target), server_of(options)
    found = [entry(LLAMA_CPP, "plain", whole, server, {})]
    for count in counts(options):
        drafted = server | {"num_drafted": count}
        looked_up = drafted | {"longest_ngram": min(LONGEST_NGRAM, count)}  # it drafts no fewer than it looks up
        found.append(entry(LLAMA_CPP, f"lookup {count}", whole, looked_up, {}))
        if options.draft:
            found.append(entry(LLAMA_CPP, f"draft {count}", whole, drafted, {}, file_of(options, options.draft)))
    return found


def entries_for_users(options: Namespace) -> list[Entry]:
    """Who answers several users at once; each server is made for `most_users`."""
    whole = f"{options.target}-{options.precision}"
    together = {"most_users": options.most_users}
    ours = {"device_map": options.device_map}
    found = [entry("mirrorsd", name, options.bundle, ours, {"method": name}) for name in options.methods.split(",")]
    target = exports_in(options.cache)["openvino-genai"] / whole
    found.append(entry("openvino-genai", "continuous batching", target, hint_of(options.precision) | together, {}))
    if options.llama_cpp:
        server = server_of(options) | together
        found.append(entry(LLAMA_CPP, "--parallel", file_of(options, options.target), server, {}))
    return found


def entry(
    runtime: str, name: str, model: Path, options: dict[str, Any], settings: dict[str, Any], draft: Path | None = None
) -> Entry:
    """One contestant: `options` are for loading the model, `settings` for each text."""
    found: Entry = {"name": f"{runtime} {name}", "runtime": runtime, "model": str(model)}
    found |= {"options": options, "settings": settings}
    return found | ({"draft": str(draft)} if draft else {})


def counts(options: Namespace) -> list[int]:
    """How many tokens the peers draft, or look up, at a time."""
    return [int(count) for count in options.drafted.split(",") if count]


def exports_in(cache: Path) -> dict[str, Path]:
    """The folders of the peers' exports."""
    return {name: cache.resolve() / name.removesuffix("-genai") for name in PEERS}


def hint_of(precision: str) -> dict[str, Any]:
    """OpenVINO's arithmetic where its own choice would not be the precision's."""
    return {"INFERENCE_PRECISION_HINT": "f32"} if precision == "fp32" else {}


def file_of(options: Namespace, checkpoint: str) -> Path:
    """llama.cpp's file of a checkpoint."""
    return Path(options.cache.resolve() / LLAMA_CPP / f"{checkpoint}-{options.precision}.gguf")


def server_of(options: Namespace) -> dict[str, Any]:
    """llama.cpp's server, with the bundle's context."""
    context = read_bundle(options.bundle).target.context
    return {"server": str(find_server(options.llama_cpp)), "context": context}
