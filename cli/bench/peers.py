"""Other runtimes as entrants: a process each, in an environment of its own, asked by lines of JSON.

Owns: reading `--peer`, starting and ending those processes, deadlines. Does not own: how a runtime is called
(`peer_worker`, which runs over there).
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from mirrorsd.cli.bench.answers import Answer
from mirrorsd.cli.bench.entrants import Entrant
from mirrorsd.cli.bench.llama_server import PROGRAM, find_server
from mirrorsd.cli.bench.peer_worker import RUNTIMES
from mirrorsd.graphs.errors import ConfigError, GenerationError

DecodeText = Callable[[Sequence[int]], str]
WORKER = Path(__file__).with_name("peer_worker.py")
PEERS = tuple(name for name in RUNTIMES if name != "mirrorsd")
LLAMA_CPP = "llama.cpp"
_FORM = (
    f"RUNTIME=PROGRAM{os.pathsep}MODEL, or RUNTIME=PROGRAM{os.pathsep}MODEL{os.pathsep}DRAFT, where PROGRAM is the "
    f"Python of the runtime's environment, or {LLAMA_CPP}'s {PROGRAM}"
)
_DEADLINE_S = 900.0
"""How long loading, or one answer, may take."""
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOption:
    """One `--peer`: a runtime, the Python of its environment (llama.cpp: its server), its model, perhaps its draft."""

    runtime: str
    program: Path
    model: Path
    draft: Path | None = None

    @property
    def name(self) -> str:
        """Of its file and its rows."""
        return self.runtime if self.draft is None else f"{self.runtime}+draft"


def read_peer(text: str) -> PeerOption:
    """Read one `--peer`.

    Raises:
        ConfigError: another form, an unknown runtime, or a path where nothing is.
    """
    runtime, equals, places = text.partition("=")
    parts = [part for part in places.split(os.pathsep) if part]
    if not equals or len(parts) not in (2, 3):
        raise ConfigError(f"--peer is {text!r}; expected {_FORM}.")
    if runtime not in PEERS:
        raise ConfigError(f"--peer names the runtime {runtime!r}; there are {', '.join(PEERS)}.")
    program = find_server(parts[0]) if runtime == LLAMA_CPP else Path(parts[0])
    model, *draft = (Path(part) for part in parts[1:])
    for path in (program, model, *draft):
        if not path.exists():
            raise ConfigError(f"--peer {runtime}: there is no {path}; expected {_FORM}.")
    return PeerOption(runtime=runtime, program=program, model=model, draft=draft[0] if draft else None)


class Worker:
    """One process of `peer_worker`: a runtime with a model."""

    def __init__(self, name: str, python: Path, arguments: Sequence[str]) -> None:
        """Start it.

        Args:
            name: of the runtime, in errors.
            python: of the environment that it decodes in.
            arguments: `peer_worker`'s.
        """
        self.name = name
        words = [str(python), str(WORKER), *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # In a session of its own a Ctrl-C does not reach it: it ends when its input does.
        self._process = subprocess.Popen(words, start_new_session=True, **pipes)
        self._answers: Queue[str] = Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait_until_ready(self) -> dict[str, Any]:
        """Block until the model is loaded; returns the versions over there.

        Raises:
            GenerationError: the process ended, or took too long.
        """
        return dict(self._read().get("versions", {}))

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have one text decoded.

        Raises:
            GenerationError: the process ended, or took too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        return self._read()

    def close(self) -> None:
        """End the process; may be called again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # what it never read
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._listener.join(_END_S)
        self._process.stdout.close()

    def _kill(self) -> None:
        """Kill it, and where the system has groups of processes, what it started."""
        if sys.platform == "win32":
            self._process.kill()
        else:
            os.killpg(self.pid, signal.SIGKILL)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _read(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=_DEADLINE_S)
        except Empty as error:
            self._kill()
            raise GenerationError(f"{self.name} did not answer within {_DEADLINE_S:g} seconds.") from error
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> GenerationError:
        status = self._process.wait(_END_S)
        return GenerationError(f"{self.name} ended without an answer (status {status}); it says why above.")


class Peer(Entrant):
    """Another runtime, which decodes greedily; quantised weights are its own, so its texts may be, too."""

    is_own = False

    def __init__(
        self,
        option: PeerOption,
        decode_text: DecodeText,
        *,
        ends: Sequence[int],
        context: int,
        threads: int,
        drafted: int,
    ) -> None:
        """Start it; `wait_until_ready` says when it is loaded.

        Args:
            option: which one.
            decode_text: the text of ids, by the bundle's tokenizer.
            ends: tokens that end a text; none where the end of text is ignored.
            context: tokens of room, for prompt and text.
            threads: of the processor.
            drafted: tokens that it drafts at a time, if it has a draft.
        """
        self.name, self._ends, self._decode_text = option.name, list(ends), decode_text
        self._is_plain, self._context = option.draft is None, context
        self._settings = {} if self._is_plain else {"num_drafted": drafted}
        draft = [] if option.draft is None else ["--draft", str(option.draft)]
        arguments = [option.runtime, str(option.model), "--threads", str(threads), *draft]
        python = option.program
        if option.runtime == LLAMA_CPP:
            of_server = {"server": str(option.program), "context": context, **self._settings}
            python, arguments = Path(sys.executable), [*arguments, "--options", json.dumps(of_server)]
        self._worker = Worker(option.name, python, arguments)

    def wait_until_ready(self) -> dict[str, Any]:
        """Block until it is loaded; returns its versions."""
        return self._worker.wait_until_ready()

    def close(self) -> None:
        """End its process."""
        self._worker.close()

    def answer(self, ids: Sequence[int], *, most: int, seed: int | None) -> Answer:
        """Answer; the token that ended the text is taken for the first of those that may."""
        most = min(most, self._context - len(ids))  # where our texts end, too
        request = {"ids": list(ids), "most": most, "ends": self._ends, "settings": self._settings}
        found = self._worker.decode(request)
        tokens = [int(token) for token in found["ids"]]
        is_ended = found["num_tokens"] > len(tokens)
        num_tokens, passes = int(found["num_tokens"]), found["passes"]
        return Answer(
            text=self._decode_text(tokens),
            token_ids=[*tokens, self._ends[0]] if is_ended else tokens,
            wall_s=float(found["seconds"]),
            finish_reason="eos" if is_ended else "length",
            num_steps=num_tokens if self._is_plain else passes,
            accept_lengths=[1] * num_tokens if self._is_plain else [],
            window_lengths=[],
            ttft_s=found["first_s"],
        )
