"""A program for a test: texts ended by Ctrl-C, cancel, close and dropped streams at random moments.

interrupted_texts.py BUNDLE 200             status 0 if the text after each of 200 of them was right
interrupted_texts.py BUNDLE 200 signals     Ctrl-C as the system sends it; without it, as Python hears of it
"""

import _thread
import os
import random
import signal
import sys
import threading
import time
from types import FrameType

from mirrorsd import MirrorPipeline
from mirrorsd.graphs.errors import Cancelled, GenerationError
from mirrorsd.runtime.session import MirrorSession

SETTINGS = {"max_new_tokens": 30, "ignore_eos": True}
METHODS = ["plain", "serial", "mirror", "auto"]
PROMPTS = [
    "Once upon a time there was a little fox who lived at the edge of a dark forest. " * 3,
    "The old heron said to the river that" * 4,
    "The river " * 30,
]
WAYS = ("ctrl-c", "cancel", "close", "dropped")


class CtrlC:
    """Sends this process an interrupt, and knows when it has arrived: a system may deliver it late."""

    def __init__(self, *, is_real: bool) -> None:
        self._is_real, self._num_sent, self._num_arrived = is_real, 0, 0
        signal.signal(signal.SIGINT, self._arrive)

    def send(self) -> None:
        """Interrupt the main thread."""
        self._num_sent += 1
        if self._is_real:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            _thread.interrupt_main()

    def wait(self) -> None:
        """Until all that were sent have arrived."""
        deadline = time.monotonic() + 10
        while self._num_arrived < self._num_sent:
            assert time.monotonic() < deadline, "the interrupt never arrived"
            time.sleep(1e-3)

    def _arrive(self, _: int, __: FrameType | None) -> None:
        self._num_arrived += 1
        raise KeyboardInterrupt


def interrupt(session: MirrorSession, way: str, prompt: str, method: str, delay: float, ctrl_c: CtrlC) -> None:
    """Begin a text on the session and end it in this way after the delay in seconds."""
    settings = {"max_new_tokens": 200, "ignore_eos": True, "method": method}
    if way == "dropped":
        stream, until = session.stream(prompt, **settings), time.perf_counter() + delay
        while next(stream, None) is not None and time.perf_counter() < until:
            pass
        return
    end = threading.Timer(delay, {"cancel": session.cancel, "close": session.close, "ctrl-c": ctrl_c.send}[way])
    end.start()
    try:
        session.generate(prompt, **settings)
    finally:
        end.cancel()
        end.join(10)
        assert not end.is_alive(), f"{way} hangs"
        ctrl_c.wait()


def main(bundle: str, count: int, *, is_real: bool) -> None:
    """Interrupt so many texts; after each of them another text must be right, and soon."""
    moments, ctrl_c, num_interrupted = random.Random(7), CtrlC(is_real=is_real), 0
    with MirrorPipeline.load(bundle, device_map="cpu", speculation={"prefill_rows": 16}) as pipe:
        expected = [pipe.generate(prompt, method="plain", **SETTINGS).token_ids for prompt in PROMPTS]
        session = pipe.session()
        for number in range(count):
            way, method, prompt = WAYS[number % 4], moments.choice(METHODS), moments.choice(PROMPTS)
            try:
                interrupt(session, way, prompt, method, moments.uniform(1e-4, 0.06), ctrl_c)
            except (KeyboardInterrupt, Cancelled, GenerationError):
                num_interrupted += 1
            if way == "close":
                session.close()
                session = pipe.session()
            check, started = moments.randrange(len(PROMPTS)), time.perf_counter()
            found = session.generate(PROMPTS[check], method=moments.choice(METHODS), **SETTINGS)
            assert found.token_ids == expected[check], (number, way, method)
            assert time.perf_counter() - started < 10, (number, way, method)
    at_most = count * 3 // 4  # a stream that is dropped says nothing
    assert num_interrupted >= count // 2, f"only {num_interrupted} of {at_most} were interrupted; the others had ended"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), is_real="signals" in sys.argv[3:])
