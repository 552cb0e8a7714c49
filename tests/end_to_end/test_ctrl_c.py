"""Ctrl-C at any moment of `mirrorsd generate`: status 130, the cursor on a new line, no abort and no traceback."""

import contextlib
import os
import random
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import terminals

pytest.importorskip("pty", reason="needs a terminal of Unix")

CODE = """
import os, sys
sys.argv[0] = "mirrorsd"
from mirrorsd.cli import main
from mirrorsd.cli.output import streams
prepare = streams.prepare_streams
streams.prepare_streams = lambda: (prepare(), os.write(1, b"\x02"))
main()
"""
ENTERED = b"\x02"
"""Shown once Python runs our code; before, an interrupt is Python's own affair."""
COMPILING = b"compiling the draft, once: 1 of"
PROMPT = "Once upon a time there was a little fox. " * 4
SEED = 26
LATER = float("inf")
LONGEST_S = 180.0
PROMPT_S = 20.0
"""The program gives itself 1.5 s; a busy machine may take longer to let it."""


class Ended(NamedTuple):
    """How a program on a terminal of its own has ended."""

    status: int
    output: bytes
    seconds: float


class Moment(NamedTuple):
    """So many seconds after something was shown."""

    seconds: float
    shown: bytes = ENTERED


def on_a_terminal(arguments: list[str], ctrl_c_at: Moment | None = None) -> Ended:
    """Run `mirrorsd` on a terminal, and press Ctrl-C there at a moment; its seconds count from when that was shown."""
    process, terminal = terminals.start(["-c", CODE, *arguments])
    shown = ctrl_c_at.shown if ctrl_c_at else ENTERED
    output, began, started, is_pressed = b"", time.monotonic(), LATER, False
    while time.monotonic() - began < LONGEST_S:
        if started == LATER and shown in output:
            started = time.monotonic()
        if ctrl_c_at is not None and not is_pressed and time.monotonic() - started >= ctrl_c_at.seconds:
            os.write(terminal, b"\x03")  # before more is read: a program that is quicker than this one never pauses
            is_pressed = True
        if select.select([terminal], [], [], 0.01)[0]:
            with contextlib.suppress(OSError):  # what Linux says of a terminal whose last program is gone
                if chunk := os.read(terminal, 65536):
                    output += chunk
                    continue
            break
    seconds = time.monotonic() - started
    if time.monotonic() - began >= LONGEST_S:
        process.kill()
    status = process.wait(PROMPT_S)
    os.close(terminal)
    return Ended(status, output, seconds)


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


def is_cancelled_at(moment: Moment, bundle: Path, place: Path) -> bool:
    """Press Ctrl-C at the moment and look at how the program ends; False if it had told its whole text before."""
    ended = on_a_terminal(first_start(bundle, place), moment)
    if ended.status == 0 and b"tokens/s" in ended.output:
        return False
    shown = f"{moment}: {ended.status}\n{ended.output.decode(errors='replace')}"
    assert ended.status == 130, shown
    assert ended.output.endswith(b"\n"), shown
    assert b"terminate" not in ended.output, shown
    assert b"Traceback" not in ended.output, shown
    assert ended.seconds - moment.seconds < PROMPT_S, f"{ended.seconds - moment.seconds:.1f} s later; {shown}"
    return True


@pytest.mark.parametrize("shown", [ENTERED, COMPILING], ids=["entered", "compiling"])
def test_ctrl_c_ends_with_130_on_a_new_line(tiny_bundle: Path, tmp_path: Path, shown: bytes) -> None:
    assert any(is_cancelled_at(Moment(0.0, shown), tiny_bundle, tmp_path / "place") for _ in range(3))


@pytest.mark.parametrize("module", ["streams", "failures", "leaving"])
def test_ctrl_c_while_the_command_is_imported(module: str) -> None:
    """Before it has begun, an import is all that there is to interrupt."""
    code = f"""
import sys
class Pressed:
    def find_spec(self, name, *_):
        if name == "mirrorsd.cli.output.{module}":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
sys.argv[1:] = ["--version"]
from mirrorsd.cli import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ctrl_c_at_fifty_random_moments(tiny_bundle: Path, tmp_path: Path) -> None:
    whole = on_a_terminal(first_start(tiny_bundle, tmp_path / "place"))
    assert whole.status == 0, whole.output.decode(errors="replace")
    assert COMPILING in whole.output
    moments = random.Random(SEED)
    at = (Moment(moments.uniform(0.0, whole.seconds)) for _ in range(150))
    num_cancelled = 0
    for moment in at:
        num_cancelled += is_cancelled_at(moment, tiny_bundle, tmp_path / "place")
        if num_cancelled == 50:
            return
    pytest.fail(f"only {num_cancelled} of 50 moments came before the text's end")
