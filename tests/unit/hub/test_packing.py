"""Packing and pushing: what one packs another fetches; the card says what the manifest knows; refusals lose nothing."""

import json
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hub_server import SHA, Faults

from mirrorsd.cli.application import run
from mirrorsd.cli.commands.sharing.card import card_text, licence_of
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.manifest import Manifest, QualityEntry, SourceModel
from mirrorsd.hub import bundle_folder, packing

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
"""How `huggingface_hub` uploads where it has no xet."""
Printed = pytest.CaptureFixture[str]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_source(manifest: Manifest, **of_target: object) -> Manifest:
    source = replace(manifest.target.source, **of_target)  # type: ignore[arg-type]
    return replace(manifest, target=replace(manifest.target, source=source))


def test_an_archive_is_a_bundle_again(bundle: Path, tmp_path: Path, own_cache: Path, capsys: Printed) -> None:
    out = tmp_path / "mine.zip"
    assert run(["pack", str(bundle), "-o", str(out)]) == 0
    digest = packing.sha256_of(out)
    assert capsys.readouterr().out == f"mirrorsd chat https://.../mine.zip#sha256={digest}\n"
    folder = bundle_folder(out)
    assert files_in(folder) == files_in(bundle) and folder.name == "mine.mirror"
    assert "mine.mirror/README.md" in zipfile.ZipFile(out).namelist()
    assert run(["pack", str(bundle), "-o", str(out)]) == 2
    assert "mine.zip exists already" in capsys.readouterr().err
    assert run(["pack", str(bundle), "-o", str(out), "--overwrite"]) == 0
    assert packing.sha256_of(out) == digest, "the same bundle is the same archive"


def test_a_folder_is_a_bundle_with_a_card(bundle: Path, tmp_path: Path, own_cache: Path, capsys: Printed) -> None:
    (bundle / "notes.txt").write_text("mine alone", encoding="utf-8")
    out = tmp_path / "packed"
    assert run(["pack", str(bundle), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"mirrorsd push {out} OWNER/tiny\n"
    assert read_bundle(out) == read_bundle(bundle)
    assert files_in(out).keys() == (files_in(bundle).keys() - {"notes.txt"}) | {"README.md"}


def test_names_with_spaces_are_told_as_they_can_be_typed(
    bundle: Path, tmp_path: Path, own_cache: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundle, tmp_path / "my pair (int8).mirror")
    assert run(["pack", "my pair (int8).mirror"]) == 0
    assert "chat https://.../my%20pair%20%28int8%29.zip#sha256=" in capsys.readouterr().out
    assert run(["pack", "my pair (int8).mirror", "-o", "out"]) == 0
    assert capsys.readouterr().out == "mirrorsd push out OWNER/my-pair-int8\n"


def test_what_is_packed_is_whole(bundle: Path, tmp_path: Path, own_cache: Path, capsys: Printed) -> None:
    (bundle / "target" / "weights.bin").write_bytes(b"changed")
    for out in ("a.zip", "a"):
        assert run(["pack", str(bundle), "-o", str(tmp_path / "out" / out)]) == 3
        assert "weights.bin" in capsys.readouterr().err
    assert run(["pack", str(tmp_path), "-o", str(tmp_path / "a.zip")]) == 3
    assert not (tmp_path / "out").exists() and not (tmp_path / "a.zip").exists()


@pytest.mark.parametrize("name", ["a.tar.gz", "a.TGZ", "a.tar", "a.ZIP", "a.7z"])
def test_no_folder_is_named_like_another_archive(
    name: str, bundle: Path, tmp_path: Path, own_cache: Path, capsys: Printed
) -> None:
    assert run(["pack", str(bundle), "-o", str(tmp_path / "out" / name)]) == 2
    assert "another kind of archive" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes there")
@pytest.mark.parametrize("output", ["caf\udce9.zip", "caf\udce9", None, "fine.zip"])
def test_a_name_that_is_no_text_is_refused(
    output: str | None, bundle: Path, tmp_path: Path, own_cache: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = shutil.copytree(bundle, tmp_path / "caf\udce9.mirror")
    before = set(tmp_path.iterdir())
    packed = bundle if output and output.startswith("caf") else odd
    assert run(["pack", str(packed), *(["-o", output] if output else [])]) == 2
    assert "is no name in UTF-8, which archives and cards need: choose another" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) - {own_cache} == before


def test_an_output_in_the_bundle_is_refused(bundle: Path, own_cache: Path, capsys: Printed) -> None:
    before = files_in(bundle)
    assert run(["pack", str(bundle), "-o", str(bundle / "a.zip")]) == 2
    assert "lies in the bundle itself" in capsys.readouterr().err
    assert files_in(bundle) == before


def test_the_card_says_sources_licences_and_figures(bundle: Path) -> None:
    quality = QualityEntry(
        text="built-in", positions=9, perplexity=29.57, reference_perplexity=29.24, top1_agreement=0.927
    )
    manifest = replace(
        with_source(read_bundle(bundle), name="org/tiny|x", revision="abc", licence="MIT"), quality=quality
    )
    card = card_text(manifest, "tiny")
    for words in (
        'license: "other"',
        "- mirrorsd\n",
        "| model | org/tiny\\|x | tiny-draft |",
        "| revision | abc | - |",
        "| licence | MIT | Apache-2.0 |",
        "perplexity 29.57 (fp32 29.24), same best token at 92.7%",
        "prefix+suffix against PyTorch: largest error 1.0e-06",
        "mirrorsd chat hf:OWNER/NAME",
    ):
        assert words in card, words
    assert "base_model" not in card, "a name that the hub does not know is no base"
    assert '- "org/tiny"\nbase_model_relation' in card_text(with_source(manifest, name="org/tiny"), "tiny")


def test_no_name_ends_the_front_matter(bundle: Path) -> None:
    card = card_text(with_source(read_bundle(bundle), licence='x"\n---\nevil: 1'), "tiny")
    assert card.split("\n---\n")[0].count("evil") == 0 or "\nevil" not in card.split("\n---\n", 1)[0]
    assert json.loads(card.splitlines()[1].removeprefix("license: "))


@pytest.mark.parametrize(
    ("target", "draft", "licence"),
    [("Apache-2.0", "apache-2.0", "apache-2.0"), ("MIT", "Apache-2.0", "other"), ("MIT", "unknown", "unknown")],
)
def test_the_licence_of_the_whole(bundle: Path, target: str, draft: str, licence: str) -> None:
    manifest = with_source(read_bundle(bundle), licence=target)
    source: SourceModel = replace(manifest.draft.source, licence=draft)
    assert licence_of(replace(manifest, draft=replace(manifest.draft, source=source))) == licence


@pytest.fixture
def without_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils.disable_progress_bars", lambda: None)


def test_what_is_pushed_is_fetched(
    asked: list[str], repository: Path, bundle: Path, tmp_path: Path, without_xet: None, capsys: Printed
) -> None:
    out, there = tmp_path / "packed", repository.parent / "mine"
    assert run(["pack", str(bundle), "-o", str(out)]) == 0
    capsys.readouterr()
    assert run(["push", str(out), "tiny/mine"]) == 0
    assert capsys.readouterr().out == f"mirrorsd chat hf:tiny/mine@{SHA}\n"
    assert "mirrorsd chat hf:tiny/mine\n" in (there / "README.md").read_text(encoding="utf-8")
    assert files_in(bundle_folder("hf:tiny/mine")) == files_in(bundle)


def test_what_a_newer_bundle_lacks_is_taken_away(
    asked: list[str], repository: Path, bundle: Path, tmp_path: Path, without_xet: None
) -> None:
    (repository / "draft" / "old.bin").write_bytes(b"old")
    assert run(["pack", str(bundle), "-o", str(tmp_path / "packed")]) == 0
    assert run(["push", str(tmp_path / "packed"), "hf:tiny/pair"]) == 0
    assert files_in(repository).keys() == files_in(bundle).keys() | {"README.md"}


def test_pushes_that_are_refused(
    asked: list[str],
    repository: Path,
    bundle: Path,
    tmp_path: Path,
    faults: Faults,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, model = tmp_path / "packed", repository.parent / "model"
    assert run(["push", str(bundle), "tiny/mine"]) == 2
    assert "has no README.md: pack the bundle first" in capsys.readouterr().err
    assert run(["pack", str(bundle), "-o", str(out)]) == 0
    assert run(["push", str(out), "mine"]) == 2
    assert "expected OWNER/NAME" in capsys.readouterr().err
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"a model")
    assert run(["push", str(out), "tiny/model"]) == 2
    assert "tiny/model holds files that are no bundle (model.safetensors" in capsys.readouterr().err
    faults.token = "secret"
    assert run(["push", str(out), "tiny/mine"]) == 3
    assert "401" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_\u00e9")
    assert run(["push", str(out), "tiny/mine"]) == 3
    said = capsys.readouterr().err
    assert "the token holds a character that cannot be sent" in said and "hf_\u00e9" not in said
    assert not (repository.parent / "mine").exists() and files_in(model).keys() == {"model.safetensors"}


def test_an_unknown_licence_is_not_published(
    asked: list[str], repository: Path, bundle: Path, tmp_path: Path, without_xet: None, capsys: Printed
) -> None:
    manifest = with_source(read_bundle(bundle), licence="unknown")
    (bundle / names.MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    assert run(["pack", str(bundle), "-o", str(tmp_path / "packed")]) == 0
    assert "find it out before you pass the bundle on" in capsys.readouterr().err
    assert run(["push", str(tmp_path / "packed"), "tiny/mine"]) == 2
    assert "--private keeps it to you" in capsys.readouterr().err
    assert run(["push", str(tmp_path / "packed"), "tiny/mine", "--private"]) == 0
    assert run(["push", str(tmp_path / "packed"), "tiny/mine", "--private"]) == 0
    shutil.rmtree(repository.parent.parent / ".private")
    assert run(["push", str(tmp_path / "packed"), "tiny/mine", "--private"]) == 2
    assert "tiny/mine is there already, and public" in capsys.readouterr().err
