"""Other runtimes as entrants: the option, the process and its deadlines, what becomes of its answers."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.cli.bench import peer_worker, peers
from mirrorsd.cli.bench.answers import Answer
from mirrorsd.cli.bench.peers import Peer, PeerOption, read_peer
from mirrorsd.graphs.errors import ConfigError, GenerationError

WORKER = """
import json, sys, time
print(json.dumps({"ready": True, "versions": {"runtime": "1.2"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["ids"] == [0]:
        sys.exit(3)
    if asked["ids"] == [1]:
        time.sleep(60)
    ids = asked["ids"][: asked["most"]]
    is_ended = len(ids) < asked["most"]
    passes = 2 if asked["settings"].get("num_drafted") == 5 else None
    answer = {"ids": ids, "num_tokens": len(ids) + is_ended, "seconds": 2.0, "first_s": 0.5, "passes": passes}
    print(json.dumps(answer), flush=True)
"""
"""Says what it is asked; ends, or sleeps, where it is told to."""


@pytest.fixture(autouse=True)
def own_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "worker.py"
    path.write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr(peers, "WORKER", path)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Peer]:
    peer = start(tmp_path, draft=None)
    yield peer
    peer.close()


def start(model: Path, draft: Path | None) -> Peer:
    option = PeerOption(runtime="openvino-genai", python=Path(sys.executable), model=model, draft=draft)
    return Peer(option, lambda ids: " ".join(map(str, ids)), ends=[9, 8], threads=1, drafted=5)


def test_an_option_names_runtime_python_model_and_draft(tmp_path: Path) -> None:
    places = os.pathsep.join([sys.executable, str(tmp_path), str(tmp_path)])
    found = read_peer(f"openvino-genai={places}")
    assert (found.runtime, found.python, found.model) == ("openvino-genai", Path(sys.executable), tmp_path)
    assert (found.draft, found.name) == (tmp_path, "openvino-genai+draft")
    assert read_peer(f"onnxruntime-genai={sys.executable}{os.pathsep}{tmp_path}").name == "onnxruntime-genai"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("openvino-genai", "expected RUNTIME=PYTHON"),
        (f"openvino-genai={sys.executable}", "expected RUNTIME=PYTHON"),
        (f"mirrorsd={sys.executable}{os.pathsep}.", "there are openvino-genai, onnxruntime-genai, llama-cpp-python"),
        (f"openvino-genai={sys.executable}{os.pathsep}nowhere", "there is no nowhere"),
    ],
)
def test_an_option_of_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_peer(text)


def test_a_plain_peer_s_steps_are_of_one_token_and_its_end_is_added(plain: Peer) -> None:
    assert plain.wait_until_ready() == {"runtime": "1.2"}
    ended = plain.answer([5, 6], most=4, seed=None)
    assert ended == Answer(
        text="5 6",
        token_ids=[5, 6, 9],
        wall_s=2.0,
        finish_reason="eos",
        num_steps=3,
        accept_lengths=[1, 1, 1],
        ttft_s=0.5,
    )
    cut = plain.answer([5, 6], most=2, seed=None)
    assert (cut.token_ids, cut.finish_reason) == ([5, 6], "length")


def test_a_drafting_peer_says_its_passes_and_no_lengths(tmp_path: Path) -> None:
    peer = start(tmp_path, draft=tmp_path)
    peer.wait_until_ready()
    found = peer.answer([5, 6, 7], most=3, seed=None)
    assert (found.num_steps, found.accept_lengths, found.prefill_s) == (2, [], None)
    peer.close()


def test_a_peer_that_ends_or_hangs_is_an_error(plain: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain.wait_until_ready()
    with pytest.raises(GenerationError, match=r"openvino-genai ended without an answer \(status 3\)"):
        plain.answer([0], most=2, seed=None)
    hanging = start(tmp_path, draft=None)
    hanging.wait_until_ready()
    monkeypatch.setattr(peers, "_DEADLINE_S", 0.1)
    with pytest.raises(GenerationError, match=r"did not answer within 0\.1 seconds"):
        hanging.answer([1], most=2, seed=None)
    hanging.close()


class FakeLlama:
    """llama-cpp-python's model: counts up from its prompt's last token, and remembers until it is reset."""

    def __init__(self, **given: Any) -> None:
        self.given, self.num_known = given, 0

    def reset(self) -> None:
        self.num_known = 0

    def generate(self, ids: list[int], *, temp: float, **sampling: Any) -> Iterator[int]:
        assert temp == 0.0
        assert self.num_known == 0, "it found a prompt that it has read before"
        self.num_known = len(ids)
        yield from range(ids[-1] + 1, 10_000)


def test_llama_cpp_forgets_ends_texts_and_takes_no_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=FakeLlama))
    runtime = peer_worker.LlamaCpp(tmp_path / "m.gguf", None, 3, {})
    asked = peer_worker.Asked(ids=[5], most=4, ends=[7], settings={})
    assert runtime.decode(asked).ids == [6, 7]
    assert runtime.decode(asked._replace(ends=[])).ids == [6, 7, 8, 9]
    assert runtime.decode(asked).passes == 2
    assert runtime._model.given["n_threads"] == 3
    with pytest.raises(SystemExit, match="takes no draft model"):
        peer_worker.LlamaCpp(tmp_path / "m.gguf", tmp_path, 3, {})


def test_a_worker_s_own_folder_hides_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    own = str(Path(peer_worker.__file__).parent)
    monkeypatch.setattr(sys, "path", [own, "", os.sep])
    peer_worker.leave_own_folder()
    assert own not in sys.path
    assert os.sep in sys.path
