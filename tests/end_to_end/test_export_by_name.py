"""From two names on a hub to a bundle that says which revisions it is made of, and how good it is."""

import json
import shutil
from pathlib import Path

import pytest
from hub_server import SHA, serve

from mirrorsd.cli.application import run
from mirrorsd.graphs.bundle_files import read_bundle


def test_names_become_a_bundle_with_pinned_revisions(
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder in tiny_pair:
        shutil.copytree(folder, tmp_path / "hub" / "tiny" / folder.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with serve(tmp_path / "hub") as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        words = ["export", "tiny/target", "--draft", "tiny/draft", "--context", "512", "--device-map", "cpu"]
        assert run(words) == 0
    said = capsys.readouterr()
    assert "tiny/draft: fetching" in said.err
    assert "device map cpu: the draft in int8-rows" in said.err
    assert "target-int8.mirror: takes about 1 MB of disk" in said.err
    assert "wrote target-int8.mirror: texts" in said.out
    assert "of the best tokens" in said.out
    assert "next: mirrorsd generate target-int8.mirror" in said.out
    manifest = read_bundle(Path("target-int8.mirror"))
    assert manifest.draft.is_for_processors, "as the card has it on a processor"
    sources = [(entry.source.name, entry.source.revision) for entry in (manifest.target, manifest.draft)]
    assert sources == [("tiny/target", SHA), ("tiny/draft", SHA)]
    assert [path.name for path in Path.cwd().iterdir()] == ["target-int8.mirror"]


@pytest.mark.parametrize("flaw", ["place", "target", "draft", "draft is no folder"])
def test_what_is_refused_for_small_files_costs_no_weights(
    flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a target of 16 GB nothing but config.json is fetched where the draft, or the bundle's place, will not do."""
    for name in ("target", "draft"):
        folder = tmp_path / "hub" / "tiny" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "t5" if flaw == name else "llama"}))
        (folder / "model.safetensors").write_bytes(b"large")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    if flaw == "place":
        (tmp_path / "target-int8.mirror").mkdir()
    draft = "./no/draft" if flaw.endswith("folder") else "tiny/draft"
    with serve(tmp_path / "hub") as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert run(["export", "tiny/target", "--draft", draft]) != 0
    words = {
        "place": "target-int8.mirror exists and is not a bundle",
        "target": "has model_type 't5', which is not supported: it is an encoder and a decoder",
        "draft": "has model_type 't5', which is not supported: it is an encoder and a decoder",
        "draft is no folder": "./no/draft is no folder or file here, and no name on the hub: that is OWNER/NAME",
    }
    assert words[flaw] in capsys.readouterr().err
    assert not [line for line in asked if "model.safetensors" in line]


def test_a_target_without_a_known_draft_says_what_to_do(
    tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(tiny_pair[0])]) == 2
    assert "name one with --draft" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "gguf", "name"])
def test_generate_says_what_a_model_is_that_is_no_bundle(
    kind: str, tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF")
    given = {"folder": str(tiny_pair[0]), "gguf": str(gguf), "name": "Qwen/Qwen3-8B"}[kind]
    words = {"folder": "is a Hugging Face checkpoint", "gguf": "is a GGUF file", "name": "name on the Hugging Face hub"}
    assert run(["generate", given, "Hello"]) == 3
    said = capsys.readouterr().err
    assert words[kind] in said
    assert f"mirrorsd export {given}" in said
