"""`mirrorsd --version` says which commit: of the package, else of the clone, else nothing."""

import subprocess
from pathlib import Path

import pytest

from mirrorsd import __version__
from mirrorsd.cli.application import run
from mirrorsd.cli.output import commit
from mirrorsd.cli.output.commit import COMMIT_FILE, source_commit


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.check_output(["git", *named, *words], cwd=folder, text=True).strip()


def test_a_clone_says_its_commit_and_whether_it_was_changed(tmp_path: Path) -> None:
    assert source_commit(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert source_commit(tmp_path) == ""
    (tmp_path / "a").write_text("a", encoding="utf-8")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    git(tmp_path, "tag", "-m", "a", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert source_commit(tmp_path) == head[:12]
    (tmp_path / "a").write_text("b", encoding="utf-8")
    assert source_commit(tmp_path) == f"{head[:12]}+"


def test_a_package_says_what_it_was_built_of(tmp_path: Path) -> None:
    (tmp_path / COMMIT_FILE).write_text("0123456789ab\n", encoding="ascii")
    assert source_commit(tmp_path) == "0123456789ab"


@pytest.mark.parametrize(("known", "said"), [("0123456789ab", " (0123456789ab)"), ("", "")])
def test_the_version_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], known: str, said: str
) -> None:
    monkeypatch.setattr(commit, "source_commit", lambda: known)
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"mirrorsd {__version__}{said}\n"
