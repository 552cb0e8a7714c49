"""llama.cpp's server as a runtime: how it is found, started, asked and ended; once with the real one, where it is."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_writer
import psutil
import pytest

from mirrorsd.cli.bench import llama_server
from mirrorsd.cli.bench.llama_server import LlamaServer, find_server, speculation
from mirrorsd.cli.bench.peers import Peer, PeerOption
from mirrorsd.graphs.errors import ConfigError, GenerationError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script with a first line")

SERVER = """#!{python}
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

words = sys.argv[1:]
given = dict(zip(words[::2], words[1::2]))
if "broken" in given["--model"]:
    sys.exit("no such architecture")

class Handler(BaseHTTPRequestHandler):
    num_asked = 0

    def do_GET(self):
        Handler.num_asked += 1
        is_loading = self.path == "/health" and Handler.num_asked < 3
        self.say({{"build_info": "b7", "words": words}}, 503 if is_loading else 200)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        start, most = asked["prompt"][-1], asked["n_predict"]
        if start == 666:
            return self.say({{"error": "too long"}}, 400)
        if start == 667:
            os._exit(3)
        if start == 668:
            time.sleep(60)
        tokens = [start + 1 + step for step in range(most + (start == 50))]
        if not asked["ignore_eos"]:
            tokens = tokens[: next((n for n, token in enumerate(tokens) if token % 100 == 0), most)]
        is_greedy = (asked["temperature"], asked["top_k"], asked["cache_prompt"]) == (0.0, 1, False)
        timings = {{"prompt_ms": 250.0, "predicted_n": len(tokens), "draft_n_accepted": 2}}
        self.say({{"tokens": tokens if is_greedy else [], "timings": timings}}, 200)

    def say(self, what, status):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def log_message(self, *words):
        print("a request came", flush=True)

HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""
"""Loads for a while, then counts up from the prompt's last token to the next multiple of a hundred."""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(SERVER.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def server(program: Path) -> Iterator[LlamaServer]:
    started = LlamaServer(Path("m.gguf"), None, 3, {"server": str(program), "context": 64})
    yield started
    started.close()


def asked(*ids: int, most: int = 4, ends: tuple[int, ...] = (100,)) -> dict[str, Any]:
    return {"ids": list(ids), "most": most, "ends": list(ends)}


def test_the_program_is_a_file_a_folder_or_a_name_on_the_path(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_server(str(program)) == find_server(str(program.parent)) == program
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    assert find_server("llama-server") == program
    with pytest.raises(ConfigError, match=r"as /nowhere/llama-server and as '/nowhere' on the PATH, and is nowhere"):
        find_server("/nowhere")


def test_it_is_one_slot_on_the_processor_with_our_threads_and_our_context(server: LlamaServer) -> None:
    words = server._ask("GET", "/props", None)["words"]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert (given["--threads"], given["--threads-batch"], given["--parallel"]) == ("3", "3", "1")
    assert (given["--device"], given["--ctx-size"], given["--model"]) == ("none", "64", "m.gguf")
    assert server.versions() == {"llama.cpp": "b7"}


@pytest.mark.parametrize(
    ("draft", "options", "words"),
    [
        (None, {}, []),
        (None, {"num_drafted": 4}, []),
        (None, {"longest_ngram": 3, "num_drafted": 4}, ["ngram-simple", "3", "4"]),
        (Path("d"), {}, ["draft-simple", "d", "none"]),
        (Path("d"), {"num_drafted": 4}, ["draft-simple", "d", "none", "4"]),
    ],
)
def test_it_drafts_by_a_model_or_looks_up(draft: Path | None, options: dict[str, Any], words: list[str]) -> None:
    assert speculation(draft, options)[1::2] == words


def test_a_text_ends_at_the_file_s_ends_or_after_the_most_tokens(server: LlamaServer) -> None:
    assert server.decode(**asked(5, 197)) == ([198, 199], 0, 0.25)
    assert server.decode(**asked(5, 7)) == ([8, 9, 10, 11], 2, 0.25)
    assert server.decode(**asked(50))[0] == [51, 52, 53, 54], "it made one more, to complete a character"
    assert server.decode(**asked(5, 198, ends=()))[0] == [199, 200, 201, 202]


def test_other_ends_than_the_file_s_are_refused(server: LlamaServer) -> None:
    with pytest.raises(GenerationError, match=r"goes on after the tokens \[8\]"):
        server.decode(**asked(7, ends=(8,)))


def test_a_refusal_an_end_and_a_deadline_are_errors(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = LlamaServer(Path("m.gguf"), None, 3, {"server": str(program), "context": 64})
    with pytest.raises(GenerationError, match=r"refused /completion with status 400: .*too long"):
        server.decode(**asked(666))
    monkeypatch.setattr(llama_server, "_ANSWER_S", 0.2)
    with pytest.raises(GenerationError, match=r"(?s)gave no answer after 0\.\d seconds \(timed out\).*a request came"):
        server.decode(**asked(668))
    server.close()
    with pytest.raises(GenerationError, match=r"ended before it was ready \(status 1\):\nno such architecture"):
        LlamaServer(Path("broken.gguf"), None, 3, {"server": str(program), "context": 64})


def test_a_server_that_ends_says_so(server: LlamaServer) -> None:
    with pytest.raises(GenerationError, match="gave no answer"):
        server.decode(**asked(667))


def test_one_that_never_gets_ready_is_ended(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text(f"#!{sys.executable}\nimport time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(llama_server, "_READY_S", 1.0)
    with pytest.raises(GenerationError, match="was not ready within 1 seconds"):
        LlamaServer(Path("m.gguf"), None, 3, {"server": str(program), "context": 64})
    assert not any(str(program) in child.cmdline() for child in psutil.Process().children())


def test_a_peer_of_the_benchmark_is_a_server_in_a_process_of_ours(program: Path) -> None:
    option = PeerOption(runtime="llama.cpp", program=program, model=Path("m.gguf"), draft=Path("d.gguf"))
    peer = Peer(option, str, ends=[200], context=64, threads=1, drafted=4)
    assert peer.wait_until_ready() == {"llama.cpp": "b7"}
    found = peer.answer([5, 197], most=4, seed=None)
    peer.close()
    assert (found.text, found.token_ids, found.finish_reason) == ("[198, 199]", [198, 199, 200], "eos")
    assert (found.ttft_s, found.num_steps) == (0.25, 0)


def test_the_real_server_writes_the_same_text_in_all_its_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = shutil.which("llama-server")
    if found is None:
        pytest.skip("llama.cpp's llama-server is not on the PATH")
    of_letters = [*gguf_writer.SPECIAL, *map(chr, range(33, 127)), "ab", "ba"]
    monkeypatch.setattr(gguf_writer, "VOCABULARY", of_letters)  # it refuses random bytes that are no characters
    model = gguf_writer.write_file(tmp_path / "m.gguf", "Q8_0")
    texts = []
    for options in ({}, {"longest_ngram": 1, "num_drafted": 4}):
        server = LlamaServer(model, None, 1, {"server": found, "context": 256} | options)
        texts.append(server.decode(**asked(1, 93, 94, most=24, ends=())))
        server.close()
    drafting = LlamaServer(model, model, 1, {"server": found, "context": 256, "num_drafted": 3})
    ids, passes, first_s = drafting.decode(**asked(1, 93, 94, most=24, ends=()))
    drafting.close()
    assert [text[0] for text in texts] == [ids, ids]
    assert (len(ids), texts[0][1]) == (24, 24)
    assert texts[1][1] < 24, "this text repeats itself"
    assert passes < 24, "a draft that is the target itself is right"
    assert first_s > 0
