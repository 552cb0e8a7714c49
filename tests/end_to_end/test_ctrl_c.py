"""Ctrl-C at any moment of `mirrorsd generate`: status 130, the cursor on a new line, no abort and no traceback."""

import contextlib
import os
import random
import select
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import terminals

pytest.importorskip("pty", reason="needs a terminal of Unix")

CODE = "import sys; sys.argv[0] = 'mirrorsd'; from mirrorsd.cli import main; main()"
PROMPT = "Once upon a time there was a little fox. " * 4
SEED = 26
ENTERED_S = 0.15
"""By then Python runs our code; before, an interrupt is Python's own affair."""
LONGEST_S = 180.0
PROMPT_S = 20.0
"""The program gives itself 1.5 s; a busy machine may take longer to let it."""


class Ended(NamedTuple):
    """How a program on a terminal of its own has ended."""

    status: int
    output: bytes
    seconds: float
    was_interrupted: bool


def on_a_terminal(arguments: list[str], ctrl_c_at: float | None = None) -> Ended:
    """Run `mirrorsd` on a terminal, and press Ctrl-C there after so many seconds."""
    process, terminal = terminals.start(["-c", CODE, *arguments])
    output, started, is_pressed = b"", time.monotonic(), False
    while time.monotonic() - started < LONGEST_S:
        if select.select([terminal], [], [], 0.01)[0]:
            with contextlib.suppress(OSError):  # what Linux says of a terminal whose last program is gone
                if chunk := os.read(terminal, 65536):
                    output += chunk
                    continue
            break
        if ctrl_c_at is not None and not is_pressed and time.monotonic() - started >= ctrl_c_at:
            os.write(terminal, b"\x03")
            is_pressed = True
    seconds = time.monotonic() - started
    if seconds >= LONGEST_S:
        process.kill()
    status = process.wait(PROMPT_S)
    os.close(terminal)
    return Ended(status, output, seconds, is_pressed)


def first_start(bundle: Path, place: Path) -> list[str]:
    """The command of a first start: nothing compiled lies in any cache."""
    shutil.rmtree(place, ignore_errors=True)
    copy = place / "fresh.mirror"
    shutil.copytree(bundle, copy)
    os.environ["MIRRORSD_CACHE"] = str(place / "cache")
    return ["generate", str(copy), PROMPT, "--device-map", "cpu", "--max-new-tokens", "400", "--ignore-eos"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRRORSD_CACHE", "")


def check_moments(bundle: Path, place: Path, count: int) -> None:
    whole = on_a_terminal(first_start(bundle, place))
    assert whole.status == 0, whole.output.decode(errors="replace")
    assert b"compiling the draft, once: 1 of" in whole.output
    moments = random.Random(SEED)
    num_cancelled = 0
    for _ in range(3 * count):
        moment = moments.uniform(ENTERED_S, whole.seconds)
        ended = on_a_terminal(first_start(bundle, place), moment)
        if not ended.was_interrupted or (ended.status == 0 and b"tokens/s" in ended.output):
            continue  # it had told its whole text before
        shown = f"after {moment:.3f} of {whole.seconds:.2f} s: {ended.status}\n{ended.output.decode(errors='replace')}"
        assert ended.status == 130, shown
        assert ended.output.endswith(b"\n"), shown
        assert b"terminate" not in ended.output, shown
        assert b"Traceback" not in ended.output, shown
        assert ended.seconds - moment < PROMPT_S, f"{ended.seconds - moment:.1f} s later; {shown}"
        num_cancelled += 1
        if num_cancelled == count:
            return
    pytest.fail(f"only {num_cancelled} of {count} moments came before the text's end")


def test_ctrl_c_ends_with_130_on_a_new_line(tiny_bundle: Path, tmp_path: Path) -> None:
    check_moments(tiny_bundle, tmp_path / "place", 2)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ctrl_c_at_fifty_random_moments(tiny_bundle: Path, tmp_path: Path) -> None:
    check_moments(tiny_bundle, tmp_path / "place", 50)
