"""An option that would do nothing is refused by its name, before anything is loaded."""

import io
from pathlib import Path

import pytest

from mirrorsd.cli.application import run


class Typing(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "words",
    [
        ["chat", "--url", "http://127.0.0.1:9", "--device-map", "cpu"],
        ["chat", "--url", "http://127.0.0.1:9", "--layout", "apart"],
        ["generate", "BUNDLE", "--trace", "out.json"],
        ["generate", "BUNDLE", "--max-new-tokens", "5"],
        ["generate", "BUNDLE", "--raw"],
        ["generate", "BUNDLE", "--messages", "chat.json", "--raw"],
        ["simulate", "RECORDING", "--seed", "3"],
        ["simulate", "RECORDING", "--record", "out.npz"],
        ["simulate", "RECORDING", "--host-ms", "1"],
    ],
    ids=" ".join,
)
def test_it_is_named(
    words: list[str], bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Typing())
    (tmp_path / "texts.npz").touch()
    places = {"BUNDLE": str(bundle), "RECORDING": str(tmp_path / "texts.npz")}
    assert run([places.get(word, word) for word in words]) == 2
    option = next(word for word in reversed(words) if word.startswith("--"))
    assert f"{option} does nothing" in capsys.readouterr().err
