"""stdin, stdout and stderr that are closed, full or left by their reader; ends of lines of other systems."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mirrorsd.cli.input.requests import read_request
from mirrorsd.cli.output.streams import prepare_streams

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a shell of Unix")
MIRRORSD = f"{sys.executable} -c \"import sys; sys.argv[0] = 'mirrorsd'; from mirrorsd.cli import main; main()\""
GENERATE = "generate BUNDLE 'Every morning' --device-map cpu --max-new-tokens 8 --ignore-eos"


def shell(line: str, bundle: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    """What a line of shell does; `mirrorsd` and BUNDLE stand for ours."""
    line = line.replace("mirrorsd", MIRRORSD).replace("BUNDLE", str(bundle))
    # `pipefail` is no part of every shell: the status of what is before a pipe goes to stderr.
    done = subprocess.run(["sh", "-c", line], input=given.encode(), capture_output=True, timeout=120)
    words = [found.decode(errors="replace") for found in (done.stdout, done.stderr)]
    assert "Traceback" not in words[1], words[1]
    assert "Exception ignored" not in words[1], words[1]
    return subprocess.CompletedProcess(line, done.returncode, *words)


def test_a_closed_stdout_is_an_error_in_one_line(tiny_bundle: Path) -> None:
    for command in ("inspect BUNDLE", GENERATE):
        done = shell(f"mirrorsd {command} >&-", tiny_bundle)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "error: The result cannot be written: stdout is closed."


def test_a_full_disk_is_an_error_even_for_what_is_written_last(tiny_bundle: Path) -> None:
    done = shell("mirrorsd --version > /dev/full", tiny_bundle)
    assert (done.returncode, done.stderr) == (1, "error: The system refuses: No space left on device.\n")


def test_nothing_is_lost_where_stderr_is_closed(tiny_bundle: Path) -> None:
    whole = shell(f"mirrorsd {GENERATE} --json", tiny_bundle)
    done = shell(f"mirrorsd {GENERATE} --json 2>&-", tiny_bundle)
    assert done.returncode == 0
    assert json.loads(done.stdout)["token_ids"] == json.loads(whole.stdout)["token_ids"]


def test_a_closed_stdin_holds_no_prompt(tiny_bundle: Path) -> None:
    done = shell("mirrorsd generate BUNDLE <&-", tiny_bundle)
    assert done.returncode == 2
    assert "The prompt is empty" in done.stderr


@pytest.mark.parametrize(("command", "count"), [("inspect BUNDLE", 0), (GENERATE.replace(" 8 ", " 300 "), 1)])
def test_a_reader_that_has_read_enough_ends_the_program_without_a_word(
    tiny_bundle: Path, command: str, count: int
) -> None:
    """What is short is in the pipe before a reader of one letter has it, where the machine is busy."""
    done = shell(f"{{ mirrorsd {command}; echo status $? >&2; }} | head -c {count}", tiny_bundle)
    assert done.stderr.splitlines()[-1] == "status 141", "as for any program that SIGPIPE ends"
    assert "error" not in done.stderr


@pytest.mark.parametrize(("given", "expected"), [("a\r\nb\r\n", "a\r\nb"), ("a\rb\n\n", "a\rb\n"), ("a", "a")])
def test_ends_of_lines_are_text_but_for_the_last(monkeypatch: pytest.MonkeyPatch, given: str, expected: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8"))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    prepare_streams()
    assert read_request(None, None, is_chat=False).prompt == expected


def test_pipes_of_windows_are_in_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code page has no snowman, and reads a prompt's letters as others."""
    monkeypatch.setattr(os, "linesep", "\r\n")
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    written = io.BytesIO()
    given = io.BytesIO("Wäre?".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given, encoding="cp1252"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    prepare_streams()
    assert read_request(None, None, is_chat=False).prompt == "Wäre?"
    print("\u2603", end="", flush=True)
    assert written.getvalue().decode() == "\u2603"


@pytest.mark.parametrize("columns", ["0", ""])
def test_a_terminal_of_no_width_loses_no_table(tiny_bundle: Path, columns: str) -> None:
    """As some terminals of containers say of themselves."""
    done = shell(f"export COLUMNS={columns} LINES=0; mirrorsd inspect BUNDLE", tiny_bundle)
    assert (done.returncode, done.stderr) == (0, "")
    assert "target/weights.bin" in done.stdout and "\u2503 SHA-256" in done.stdout
