"""`mirrorsd chat` with a real bundle: in a pipe, on a terminal, and through a server."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import run as run_program
from typing import Any

import pytest
import terminals

from mirrorsd import MirrorPipeline
from mirrorsd.cli.chat.over_http import OverHttp
from mirrorsd.graphs.errors import ConfigError, ContextLengthError, DeviceError
from mirrorsd.runtime import GenerationConfig

QUESTIONS = ("Tell me of the fox.", "And the heron?")
MAX = 24
READY = r"\x1b\[\?2004h"
"""What an editor says when it takes a line: that it knows pasted text."""
KEY = "a-key-for-the-tests-only"


def conversation(bundle: Path, **settings: Any) -> list[str]:
    """What `generate` answers to the questions, one after another."""
    messages: list[dict[str, str]] = []
    with MirrorPipeline.load(bundle, device_map="cpu") as pipe:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            text = pipe.generate(messages=messages, max_new_tokens=MAX, method="plain", **settings).text
            messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages[1::2]]


def chat(*options: str, lines: tuple[str, ...] = QUESTIONS, environment: dict[str, str] | None = None) -> Any:
    command = [sys.executable, "-m", "mirrorsd.cli", "chat", *options, "--max-new-tokens", str(MAX)]
    typed = "".join(f"{line}\n" for line in lines).encode()
    return run_program(
        command, input=typed, capture_output=True, timeout=120, env={**os.environ, **(environment or {})}
    )


def test_a_pipe_gets_exactly_the_texts_of_generate(tiny_bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    finished = chat(str(tiny_bundle), "--device-map", "cpu", lines=(*QUESTIONS, f"/trace {trace}", "/compare"))
    assert finished.returncode == 0, finished.stderr.decode()
    texts = conversation(tiny_bundle)
    assert finished.stdout.decode() == "".join(f"{text}\n" for text in texts)
    assert "identical: yes" in finished.stderr.decode()
    document = json.loads(trace.read_text(encoding="utf-8"))
    steps = [event["args"]["text"] for event in document["traceEvents"] if event["name"].startswith("step ")]
    assert "".join(steps) == texts[-1]
    assert "plain_tokens_per_second" in document["otherData"]


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[str]:
    pytest.importorskip("starlette", reason="the server needs starlette")
    from mirrorsd.server import ServerSettings
    from mirrorsd.server.running import Running

    with Running({"tiny": tiny_bundle}, ServerSettings(port=0, device_map="cpu", keys=(KEY,))) as running:
        yield running.url


def test_a_server_gives_the_same_texts(server: str, tiny_bundle: Path) -> None:
    sampled = ("--temperature", "0.9", "--seed", "7")
    lines = (*QUESTIONS, "/compare")
    finished = chat("--url", server, *sampled, lines=lines, environment={"MIRRORSD_API_KEY": KEY})
    assert finished.returncode == 0, finished.stderr.decode()
    expected = "".join(f"{text}\n" for text in conversation(tiny_bundle, temperature=0.9, seed=7))
    assert finished.stdout.decode() == expected
    assert "identical: yes" in finished.stderr.decode()


def test_a_server_that_refuses_is_understood(server: str) -> None:
    with pytest.raises(ConfigError, match="MIRRORSD_API_KEY"):
        OverHttp(server)
    with pytest.raises(DeviceError, match=r"No server answers at http://127\.0\.0\.1:9"):
        OverHttp("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="allowed: a server's address"):
        OverHttp("tiny.mirror")
    answers = OverHttp(server, KEY)
    long = [{"role": "user", "content": "fox " * 600}]
    assert answers.num_tokens(long) > answers.context == 512
    with pytest.raises(ContextLengthError):
        list(answers.stream(long, GenerationConfig(max_new_tokens=5)))


def test_hanging_up_ends_the_answer(server: str) -> None:
    answers = OverHttp(server, KEY)
    pieces = answers.stream([{"role": "user", "content": "fox"}], GenerationConfig(max_new_tokens=400, ignore_eos=True))
    first = next(pieces)
    answers.cancel()
    *_, last = pieces
    assert last.ended is not None
    assert last.ended.stop_reason == "cancelled"
    assert last.ended.text.startswith(first.text)


def test_a_terminal_edits_remembers_and_stops(tiny_bundle: Path, tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect", reason="pexpect plays the terminal")
    fdpexpect = pytest.importorskip("pexpect.fdpexpect", reason="pexpect plays the terminal")
    environment = {
        **os.environ,
        "XDG_CONFIG_HOME": str(tmp_path),
        "TERM": "xterm-256color",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    command = ["-m", "mirrorsd.cli", "chat", str(tiny_bundle), "--device-map", "cpu", "--max-new-tokens", "400"]
    chat = terminals.start(command, environment, (30, 100))
    terminal = fdpexpect.fdspawn(chat.terminal, encoding="utf-8", timeout=60, codec_errors="replace")
    try:
        terminal.expect("tokens of context")
        terminal.expect(READY)
        terminal.send("fix\x7f\x7fox\r")
        terminal.expect("tokens/s")
        terminal.expect(READY)
        terminal.send("/me\t")
        terminal.expect("thod")  # what was typed is completed
        terminal.send(" serial\r")
        terminal.expect("method: serial")
        terminal.expect(READY)
        terminal.send("/compare\r")
        terminal.expect("identical: yes")
        terminal.expect(READY)
        terminal.send("heron\r")
        terminal.expect("Ctrl-C stops|tokens/s")
        terminal.send("half a thouht\x1b[D\x1b[Dg")
        terminal.expect(READY)
        assert "half" not in terminal.before, "what is typed during an answer stands in its text"
        terminal.expect("half a thou(.|\n)*g(.|\n)*ht")  # kept, with the keys that edit it
        terminal.send("\x03")
        terminal.expect(READY)
        terminal.send("half a question\x03")
        terminal.expect(READY)
        terminal.send("/stats\r")
        terminal.expect("tokens read")
        terminal.expect(READY)
        terminal.send("\x04")
        terminal.expect(pexpect.EOF)
    finally:
        chat.process.kill()
        chat.process.wait(60)
        terminal.close()
    history = (tmp_path / "mirrorsd" / "chat_history").read_text(encoding="utf-8")
    assert "+fox\n" in history
    assert (tmp_path / "mirrorsd" / "chat_history").stat().st_mode & 0o077 == 0
