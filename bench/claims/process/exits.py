"""Fifty scripts that end without `close`: each with its own exit status, whatever the devices are at.

    python bench/claims/process/exits.py storyteller.mirror --output exits.json

Ten ways to end, each in five states of the devices. A script that hangs for a minute is ended and counts as wrong.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from mirrorsd.bench import runs

_LONGEST_S = 60.0
_METHODS = ("plain", "serial", "mirror", "auto", "lookup")
_BEGIN = """
import asyncio, os, signal, sys, threading, time
from mirrorsd import MirrorPipeline
pipe = MirrorPipeline.load({bundle!r}, device_map="cpu")
PROMPT, SETTINGS = "Once upon a time there was a", dict(max_new_tokens=100, ignore_eos=True, method={method!r})
"""
STATES = {
    "after a text": "pipe.generate(PROMPT, **SETTINGS)",
    "half-read stream": """
stream = pipe.stream(PROMPT, **SETTINGS)
next(stream), next(stream)
""",
    "daemon's text": """
began = threading.Event()
def talk():
    while True:
        for _ in pipe.stream(PROMPT, **SETTINGS):
            began.set()
threading.Thread(target=talk, daemon=True).start()
began.wait()
""",
    "sessions and seats": """
session, seats = pipe.session(), pipe.seats(2)
streams = [session.stream(PROMPT, **SETTINGS), pipe.stream(PROMPT, **SETTINGS)]
[next(stream) for stream in streams]
pipe.itself = pipe
""",
    "in an event loop": """
stream = pipe.astream(PROMPT, **SETTINGS)
await anext(stream)
""",
}
"""What the devices are at, as Python."""


class Ending(NamedTuple):
    """How a script ends, as Python, and the status that it has then."""

    code: str
    status: int


ENDINGS = {
    "at its end": Ending("", 0),
    "sys.exit": Ending("sys.exit(3)", 3),
    "words": Ending("sys.exit('That is all.')", 1),
    "error": Ending("raise RuntimeError('on purpose')", 1),
    "Ctrl-C": Ending("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -signal.SIGINT),
    "SIGTERM": Ending("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM),
    "handler": Ending("signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); signal.raise_signal(signal.SIGTERM)", 4),
    "os._exit": Ending("os._exit(7)", 7),
    "another thread": Ending(
        "threading.Thread(target=pipe.session().generate, args=(PROMPT,)).start(); sys.exit(6)", 6
    ),
    "forked child": Ending(
        """
child = os.fork()
if not child:
    sys.exit(5)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
        5,
    ),
}


class Script(NamedTuple):
    """A program, and the status that it shall end with."""

    state: str
    ending: str
    code: str
    status: int


def scripts(bundle: Path) -> Iterator[Script]:
    """Every ending in every state; the methods take turns."""
    for row, (state, doing) in enumerate(STATES.items()):
        for column, (name, ending) in enumerate(ENDINGS.items()):
            body = f"{doing}\n{ending.code}\n"
            if "await" in doing:
                body = f"async def main():\n{indent(body, '    ')}\nasyncio.run(main())"
            begin = _BEGIN.format(bundle=str(bundle), method=_METHODS[(row + column) % len(_METHODS)])
            yield Script(state, name, begin + body, ending.status)


def run(script: Script) -> int | None:
    """The status that it ends with; None if it does not end."""
    try:
        command = [sys.executable, "-W", "ignore", "-c", script.code]
        return subprocess.run(command, capture_output=True, timeout=_LONGEST_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def main() -> None:
    """Run all of them and print what each ended with."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("bundle", type=Path)
    options.add_argument("--output", type=Path)
    chosen = options.parse_args()
    rows = []
    for script in scripts(chosen.bundle):
        found = run(script)
        rows.append({"state": script.state, "ending": script.ending, "expected": script.status, "found": found})
        print(f"{script.state:<20}{script.ending:<16}{script.status:>5}{found!s:>6}", flush=True)
    num_own = sum(row["found"] == row["expected"] for row in rows)
    print(f"{num_own} of {len(rows)} with their own status")
    runs.finish(runs.header(chosen.bundle, own=num_own, scripts=len(rows), rows=rows), chosen.output)
    sys.exit(num_own < len(rows))


if __name__ == "__main__":
    main()
