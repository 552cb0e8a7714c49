"""Every command that takes a bundle takes any reference to one; a command line that is wrong fetches nothing."""

import shutil
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
from hub_server import serve

from mirrorsd.cli.application import application, run
from mirrorsd.cli.input import options
from mirrorsd.graphs.user_cache import fetched_folder
from mirrorsd.server import named_folders

FETCHING = {"chat", "generate", "compare", "bench", "inspect", "compile", "tune", "doctor", "pack", "push"}
OF_THEIR_OWN = {"serve": "several, by name", "simulate": "a recording, too"}


@pytest.fixture
def asked(tmp_path: Path, bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    shutil.copytree(bundle, tmp_path / "hub" / "tiny" / "pair")
    with serve(tmp_path / "hub") as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield asked


def test_no_command_has_a_bundle_of_its_own_kind() -> None:
    commands = [command.callback for command in application().registered_commands if command.callback is not None]
    taking = {
        command.__name__: parameter.annotation
        for command in commands
        for name, parameter in signature(command).parameters.items()
        if name in ("bundle", "bundles", "source")
    }
    assert taking.keys() == FETCHING | OF_THEIR_OWN.keys()
    assert {name for name, kind in taking.items() if kind in (options.Bundle, options.MaybeBundle)} == FETCHING


def test_a_command_gets_the_folder(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "hf:tiny/pair", "--json"]) == 0
    captured = capsys.readouterr()
    assert '"name": "tiny-target"' in captured.out
    assert "fetching tiny/pair, 1 MB, revision 01234567" in captured.err
    asked.clear()
    assert run(["inspect", "hf:tiny/pair", "--json"]) == 0
    assert asked == [] and capsys.readouterr() == (captured.out, "")


@pytest.mark.parametrize(
    "words",
    [["generate", "hf:tiny/pair", "Hi", "--temperature", "warm"], ["inspect", "hf:tiny/pair", "--nothing"]],
)
def test_nothing_is_fetched_for_a_command_line_that_is_wrong(words: list[str], asked: list[str]) -> None:
    assert run(words) == 2
    assert asked == []


def test_an_error_of_the_hub_is_one_sentence(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "hf:tiny/nothing"]) == 3
    assert "has no model of that name" in capsys.readouterr().err


def test_the_server_takes_references_by_name(asked: list[str], bundle: Path) -> None:
    found = named_folders(["hf:tiny/pair", "mine=hf:tiny/pair", f"other={bundle}"])
    kept = next(fetched_folder().glob("*/*.mirror"))
    assert found == {"pair": kept, "mine": kept, "other": bundle}


def test_an_archive_here_is_served_by_its_own_name(bundle: Path, tmp_path: Path, own_cache: Path) -> None:
    """Not by that of another one, which this machine has seen before with the same bundle in it."""
    archives = [tmp_path / name for name in ("first (1).zip", "second.mirror.zip")]
    assert run(["pack", str(bundle), "-o", str(archives[0])]) == 0
    shutil.copy(archives[0], archives[1])
    found = named_folders([str(path) for path in archives])
    assert list(found) == ["first (1)", "second"] and len(set(found.values())) == 1
    folder = tmp_path / "v1.zip"
    shutil.copytree(bundle, folder)
    assert named_folders([str(folder)]) == {"v1.zip": folder}, "a folder has its own name"


def test_the_cache_lists_and_clears_what_was_fetched(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "hf:tiny/pair", "--json"]) == 0
    assert run(["cache", "list"]) == 0
    assert "hf:tiny/pair@0123456789abcdef" in capsys.readouterr().out.replace("\n", "")
    assert run(["cache", "clear"]) == 0
    assert list(fetched_folder().glob("*/*.mirror")), "gigabytes are not thrown away unasked"
    assert run(["cache", "clear", "hf:tiny/pair"]) == 0
    assert not list(fetched_folder().glob("*"))
    (fetched_folder() / "half" / ".partial").mkdir(parents=True)
    assert run(["cache", "clear", "--fetched"]) == 0
    assert not list(fetched_folder().glob("*"))
