"""How a chat is sampled where nobody says so: by the checkpoint, else by its family's makers, else as usual."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.chat_defaults import FAMILIES, ORDINARY, chat_defaults
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import Manifest, with_checksum
from mirrorsd.graphs.manifest_values import read_manifest
from mirrorsd.texts.config import GenerationConfig


@pytest.mark.parametrize(
    ("generation", "expected", "source"),
    [
        ({}, {"do_sample": True, **ORDINARY}, "built-in"),
        ({"repetition_penalty": 1.1}, {"do_sample": True, **ORDINARY, "repetition_penalty": 1.1}, "built-in"),
        ({"temperature": 0.2}, {"do_sample": True, **ORDINARY, "temperature": 0.2}, "built-in"),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, "checkpoint"),
        ({"do_sample": False}, {"do_sample": False}, "checkpoint"),
        ({"temperature": 0}, {"temperature": 0}, "checkpoint"),
    ],
)
def test_what_the_checkpoint_names_stands(generation: dict[str, Any], expected: dict[str, Any], source: str) -> None:
    found = chat_defaults("llama", generation)
    assert (found.generation, found.source) == (expected, source)


@pytest.mark.parametrize("family", [*FAMILIES, "llama", "a family of tomorrow"])
def test_every_default_makes_a_seeded_sampled_text(family: str) -> None:
    resolved = GenerationConfig(seed=7).resolve(chat_defaults(family, {}).generation)
    assert resolved.is_sampling and resolved.seed == 7 and resolved.temperature
    assert GenerationConfig(temperature=0.0).resolve(chat_defaults(family, {}).generation).is_sampling is False
    greedy = GenerationConfig(temperature=0.0, use_defaults=False).resolve(chat_defaults(family, {}).generation)
    assert (greedy.is_sampling, greedy.repetition_penalty) == (False, 1.0)


def test_a_family_s_values_name_their_address() -> None:
    found = chat_defaults("qwen2", {})
    assert found.generation == {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert found.source.startswith("qwen2: https://")


def test_the_manifest_keeps_them_and_an_older_one_has_them_computed(bundle: Path) -> None:
    older = read_bundle(bundle)
    assert older.chat is None and older.chat_defaults == chat_defaults(older.target.source.family, older.generation)
    assert older.chat_settings(None)["temperature"] == 0.8
    assert older.chat_settings(0.9) == {}, "a request that names its temperature says how it is sampled"
    written = replace(older, chat=chat_defaults("qwen3", {"top_k": 5}))
    again = read_manifest(written.to_json(), origin="here")
    assert again.chat_defaults.generation["top_k"] == 5 and again.chat_defaults.source.startswith("qwen3: ")


def test_a_setting_that_is_none_is_refused(bundle: Path) -> None:
    manifest: Manifest = read_bundle(bundle)
    document = json.loads(replace(manifest, chat=chat_defaults("llama", {})).to_json())
    document["chat"]["generation"]["top_p"] = "much"
    (bundle / names.MANIFEST_FILE).write_text(json.dumps(with_checksum(document)), encoding="utf-8")
    with pytest.raises(BundleError, match=r"chat\.generation\.top_p"):
        read_bundle(bundle)
