"""What is wrong ends a command with one message and a status, before anything is loaded where that can be."""

import re
from pathlib import Path
from typing import Any

import pytest

import mirrorsd
from mirrorsd.cli.application import run
from mirrorsd.cli.output.failures import as_typed
from mirrorsd.graphs.errors import (
    BundleError,
    Cancelled,
    ConfigError,
    ContextLengthError,
    DeviceError,
    ExportError,
    GenerationError,
    MirrorError,
    ParityError,
)

ROOT = Path(mirrorsd.__file__).parent


def same_answer(method: str, text: str) -> list[int]:
    return [1, 2, 3]


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "b.mirror", ""],
        ["generate", "b.mirror", " "],
        ["generate", "b.mirror", "Once", "--trace", "nowhere/trace.json"],
        ["generate", "b.mirror", "Once", "--trace", "."],
        ["generate", "b.mirror", "--messages", "nowhere.json"],
        ["compare", "b.mirror", "--prompts", "nowhere.jsonl"],
        ["simulate", "b.mirror", "--record", "nowhere/b.npz"],
        ["simulate", ".", "--device-map", "cpu"],
        ["simulate", ".", "--device-map", "lunar-lake"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_noticed_before_anything_is_loaded(use_pipeline: Any, command: list[str]) -> None:
    pipeline = use_pipeline(same_answer)
    assert run(command) == 2
    assert not hasattr(pipeline, "loaded")


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "b.mirror", "Once", "--trace", "PLACE"],
        ["simulate", "b.mirror", "--record", "PLACE"],
        ["bench", "b.mirror", "q.jsonl", "-o", "PLACE"],
        ["train", "report", "target", "--prompts", "q.jsonl", "-o", "PLACE"],
    ],
    ids=" ".join,
)
def test_a_place_that_takes_no_file_is_refused_before_the_work(
    use_pipeline: Any, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = '{"question_id": 1, "category": "a", "turns": ["b"]}'
    (tmp_path / "q.jsonl").write_text(question, encoding="utf-8")
    place = tmp_path / ("x" * 300)
    pipeline = use_pipeline(same_answer)
    assert run([{"PLACE": str(place), "q.jsonl": str(tmp_path / "q.jsonl")}.get(word, word) for word in command]) == 2
    assert f"{place} cannot be written: " in capsys.readouterr().err
    assert not hasattr(pipeline, "loaded")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (ContextLengthError, 2),
        (BundleError, 3),
        (ExportError, 3),
        (ParityError, 3),
        (DeviceError, 4),
        (Cancelled, 130),
        (KeyboardInterrupt, 130),
        (GenerationError, 1),
        (MirrorError, 1),
    ],
)
def test_errors_are_one_message_and_a_status(
    use_pipeline: Any, capsys: pytest.CaptureFixture[str], error: type[BaseException], code: int
) -> None:
    def fail(method: str, text: str) -> list[int]:
        raise error("found this; do [that].")

    use_pipeline(fail)
    assert run(["generate", "b.mirror", "Once", "--json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    if issubclass(error, MirrorError):
        assert err == "error: found this; do [that].\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "Missing argument"),
        (["generate", "b", "p", "--nonsense"], "No such option"),
        (["generate", "b", "p", "--method", "magic"], "'magic' is not one of 'plain', 'serial', 'mirror', 'auto'"),
        (["generate", "b", "p", "--temperature", "hot"], "Invalid value for '--temperature'"),
        (["generate", "b", "p", "--max-new-tokens", "0"], "error: --max-new-tokens is 0; allowed"),
        (["generate", "b", "p", "--seed", "-1", "--temperature", "1"], "error: --seed is -1"),
        (["generate", "b", "p", "-S", "gama=4"], "There is no speed setting 'gama'; did you mean 'gamma'?"),
        (["generate", "b", "p", "-S", "gamma=many"], "-S gamma is 'many'; allowed: a whole number"),
        (["generate", "b", "p", "-S", "gamma"], "expected NAME=VALUE"),
        (["generate", "b", "p", "-S", "exits=some"], "-S exits is 'some'"),
        (["compare", "b", "--methods", "plain,plain"], "--methods is 'plain,plain'"),
        (["compare", "b", "--methods", ""], "--methods is ''"),
        (["compare", "b", "--category", "magic"], "No question has the category 'magic'"),
        (["compare", "b", "--repeats", "0"], "greater than or equal to 1"),
        (["export", "t", "--draft", "d", "-o", "o", "--exit-layer", "half"], "--exit-layer is 'half'"),
        (["export", "t", "--draft", "d", "-o", "o", "--device-map", "cpuu"], "did you mean 'cpu'"),
        (["export", "t", "--draft", "d", "-o", "o", "--precision", "fp3"], "'fp3' is not one of 'fp32'"),
        (["serve", "b", "--port", "99999"], "error: --port is 99999; allowed: 0 to 65535"),
        (["serve", "b", "--grace", "nan"], "error: --grace is nan"),
        (["serve", "b", "--seats", "0"], "error: --seats is 0"),
        (["serve", "b", "--queue", "-1"], "error: --queue is -1"),
        (["serve", "b", "--allowed-host", "*"], "error: --allowed-host is '*'"),
        (["serve", "b", "--allowed-origin", "*"], "error: --allowed-origin is '*'"),
        (["front", "http://b", "--port", "99999"], "error: --port is 99999"),
        (["serve", "b", "--device-map", "nope"], "Unknown device map 'nope'"),
        (["unknown"], "No such command"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert "listening" not in err
    assert out == ""


def test_every_owner_of_a_field_that_is_refused_is_known_here() -> None:
    """Else an error names a class that nobody has typed."""
    named = re.compile(r"""raise \w+\(\s*f?"([A-Z][A-Za-z]+)\.(?:\{\w+\}|[a-z_]+) """)
    sources = [path for room in ("export", "server", "texts", "training") for path in (ROOT / room).rglob("*.py")]
    found = {owner for path in sources for owner in named.findall(path.read_text(encoding="utf-8"))}
    assert {"ServerSettings", "GenerationConfig"} <= found
    assert {as_typed(f"{owner}.device is 3") for owner in found} == {"--device is 3"}


@pytest.mark.parametrize(
    "command", [["inspect", "{}"], ["generate", "{}", "hi"], ["compare", "{}"]], ids=lambda command: command[0]
)
def test_a_folder_that_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert run([part.format(tmp_path) for part in command]) == 3
    assert "so it is not a bundle" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unknown_device_map_is_a_usage_error(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(bundle), "hi", "--device-map", "gpu"]) == 2
    assert "Unknown device map 'gpu'" in capsys.readouterr().err


def test_absent_device_is_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(bundle), "hi", "--device-map", "cuda-npu"]) == 4
    assert "CUDAExecutionProvider" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "needs the package torch"),
        (ModuleNotFoundError("No module named 'odd'", name="odd.part"), "pip install odd."),
        (ImportError("libfoo.so: cannot open"), "A package cannot be loaded: libfoo.so"),
        (FileNotFoundError(2, "No such file or directory", "out/x.json"), "error: out/x.json: No such file"),
        (OSError(28, "No space left on device"), "The system refuses: No space left on device."),
    ],
)
def test_the_last_net_makes_one_sentence_of_a_missing_package_or_file(
    use_pipeline: Any, capsys: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    def fail(method: str, text: str) -> list[int]:
        raise error

    use_pipeline(fail)
    assert run(["generate", "b.mirror", "Once", "--json"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_a_file_that_ends_too_early_is_no_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer takes the end of any file for Ctrl-D."""

    def read(_: Path) -> None:
        raise EOFError("no data left")

    monkeypatch.setattr("mirrorsd.cli.output.trace_picture.read_trace", read)
    with pytest.raises(EOFError, match="no data left"):
        run(["trace", str(tmp_path / "trace.json")])
