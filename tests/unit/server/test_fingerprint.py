"""The fingerprint changes with everything that may change a byte, and with nothing else."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.device_maps import load_device_map
from mirrorsd.devices import hardware
from mirrorsd.runtime import SpeculationConfig
from mirrorsd.server.bundles import fingerprint as module

fingerprint = module.fingerprint


def pipeline(**changes: Any) -> Any:
    usual = {
        "device_map": load_device_map("cpu"),
        "speculation": SpeculationConfig(),
        "sampled_speculation": SpeculationConfig(),
        "layout": "apart",
    }
    return SimpleNamespace(**{**usual, **changes})


def test_it_is_the_same_twice_and_begins_with_a_word(bundle: Path) -> None:
    found = fingerprint(bundle, pipeline())
    assert found == fingerprint(bundle, pipeline())
    assert found.startswith("bundle-")


def test_another_bundle_tokenizer_or_template_changes_it(bundle: Path) -> None:
    seen = {fingerprint(bundle, pipeline())}
    (bundle / "tokenizer" / "chat_template.jinja").write_text("x")
    seen.add(fingerprint(bundle, pipeline()))
    (bundle / "tokenizer" / "tokenizer.json").write_text("x")
    seen.add(fingerprint(bundle, pipeline()))
    (bundle / "manifest.json").write_text("x")
    seen.add(fingerprint(bundle, pipeline()))
    assert len(seen) == 4


def test_what_the_system_puts_beside_the_tokenizer_does_not(bundle: Path) -> None:
    """Such as a Mac's `.DS_Store`: a bundle is loaded with it, and a text goes on where there is none."""
    usual = fingerprint(bundle, pipeline())
    (bundle / "tokenizer" / ".DS_Store").write_bytes(b"1")
    (bundle / "tokenizer" / ".sync").mkdir()
    assert fingerprint(bundle, pipeline()) == usual


def test_other_versions_and_another_processor_change_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {fingerprint(bundle, pipeline())}
    monkeypatch.setattr(module.metadata, "version", lambda package: "0")
    seen.add(fingerprint(bundle, pipeline()))
    monkeypatch.setattr(module, "processor_name", lambda: "another")
    seen.add(fingerprint(bundle, pipeline()))
    monkeypatch.setattr(module, "__version__", "9")
    seen.add(fingerprint(bundle, pipeline()))
    assert len(seen) == 4


def test_another_graphics_card_changes_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that one has begun would go on with the last bits of another."""
    found = set()
    for name in ("NVIDIA L4 570.1", "NVIDIA A10 570.1"):
        monkeypatch.setattr(hardware, "target_name", lambda _, name=name: name)
        found.add(fingerprint(bundle, pipeline(device_map=load_device_map("cuda-cpu"))))
    assert len(found) == 2


def test_other_devices_and_padding_change_it_but_not_how_it_is_speculated(bundle: Path) -> None:
    card = load_device_map("cpu")
    usual = fingerprint(bundle, pipeline())
    placed = replace(card, target=replace(card.target, threads=7))
    padded = replace(SpeculationConfig(), pad_rows_to=8)
    assert fingerprint(bundle, pipeline(device_map=placed)) != usual
    assert fingerprint(bundle, pipeline(speculation=padded)) != usual
    other = replace(SpeculationConfig(), gamma=3, roots=2)
    assert fingerprint(bundle, pipeline(speculation=other, sampled_speculation=other)) == usual
