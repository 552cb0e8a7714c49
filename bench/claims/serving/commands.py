"""`mirrorsd serve` and `mirrorsd front` as processes, which can be killed, stopped and started anew."""

import socket
import subprocess
import sys
import urllib.request
from time import monotonic, sleep
from typing import ClassVar, Self

_START_S, _LOOK_S = 300.0, 0.05


class Command:
    """One of them on a free port, which it keeps when it is started anew; killed at the end of a `with` block."""

    _given: ClassVar[set[int]] = set()

    def __init__(self, *words: str) -> None:
        """Start it; `words` follow `mirrorsd`."""
        self.port = self._free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "mirrorsd", *words, "--port", str(self.port), "--quiet"]
        self.start()

    @classmethod
    def _free_port(cls) -> int:
        """One that no other command has: the system may name a port twice before its first owner listens there."""
        while True:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = int(free.getsockname()[1])
            if port not in cls._given:
                cls._given.add(port)
                return port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it anew; it may listen a while before it answers."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def wait(self) -> None:
        """Wait until it takes requests.

        Raises:
            SystemExit: it has ended, or needs minutes.
        """
        until = monotonic() + _START_S
        while (has_ended := self.process.poll() is not None) or not self.is_ready:  # who answers may be another one
            if has_ended or monotonic() > until:
                raise SystemExit(f"{' '.join(self._command[3:])} does not start: status {self.process.poll()}")
            sleep(_LOOK_S)

    def kill(self) -> None:
        """Kill it as the system does: with SIGKILL, where there are signals."""
        self.process.kill()
        self.process.wait(_START_S)

    def stop(self) -> int:
        """Tell it to stop, wait for its end, and return its status."""
        self.process.terminate()
        return self.process.wait(_START_S)
