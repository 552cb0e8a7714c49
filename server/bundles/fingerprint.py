"""What identifies the bytes of an answer: equal fingerprint, seed and request give equal text."""

import hashlib
import json
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from mirrorsd import __version__
from mirrorsd.devices.inventory import runtime_versions
from mirrorsd.devices.layouts import processor_name
from mirrorsd.graphs import names
from mirrorsd.runtime import MirrorPipeline

_TEXT_PACKAGES = ("numpy", "tokenizers", "jinja2", "llguidance")


def fingerprint(bundle: Path, pipe: MirrorPipeline) -> str:
    """The `system_fingerprint` of answers.

    It covers the bundle's manifest, which has the hashes of its graphs, its tokenizer and template, the versions of
    what computes and of what turns tokens into text, the devices of the card, the processor, and the padding of passes.
    How it is speculated, and how many users there are, changes no byte and is left out.
    """
    card = pipe.device_map
    facts = {
        "device": _device_of(pipe),
        "bundle": {str(path.relative_to(bundle)): _digest(path) for path in _small_files(bundle)},
        "versions": {**_versions(), **runtime_versions(), "mirrorsd": __version__},
        "target": asdict(card.target),
        "exit": asdict(card.exit),
        "processor": processor_name(),
        "padding": [pipe.speculation.pad_rows_to, pipe.sampled_speculation.pad_rows_to],
        "prefill": [pipe.speculation.prefill_rows, pipe.sampled_speculation.prefill_rows],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"bundle-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _device_of(pipe: MirrorPipeline) -> str:
    if pipe.device_map.target.is_on_cpu:
        return ""
    from mirrorsd.devices.hardware import target_name  # which loads OpenVINO

    return target_name(pipe.device_map.target)


def _small_files(bundle: Path) -> list[Path]:
    """The manifest and what is read of the tokenizer: folders, and files that are hidden, are the system's own."""
    found = sorted((bundle / names.TOKENIZER_FOLDER).iterdir())
    return [bundle / names.MANIFEST_FILE, *(path for path in found if path.is_file() and path.name[0] != ".")]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for package in _TEXT_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
