"""Other runtimes as entrants: the option, the process and its deadlines, what becomes of its answers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
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
    option = PeerOption(runtime="openvino-genai", program=Path(sys.executable), model=model, draft=draft)
    return Peer(option, lambda ids: " ".join(map(str, ids)), ends=[9, 8], context=64, threads=1, drafted=5)


def test_an_option_names_runtime_python_model_and_draft(tmp_path: Path) -> None:
    places = os.pathsep.join([sys.executable, str(tmp_path), str(tmp_path)])
    found = read_peer(f"openvino-genai={places}")
    assert (found.runtime, found.program, found.model) == ("openvino-genai", Path(sys.executable), tmp_path)
    assert (found.draft, found.name) == (tmp_path, "openvino-genai+draft")
    assert read_peer(f"onnxruntime-genai={sys.executable}{os.pathsep}{tmp_path}").name == "onnxruntime-genai"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("openvino-genai", "expected RUNTIME=PROGRAM"),
        (f"openvino-genai={sys.executable}", "expected RUNTIME=PROGRAM"),
        (f"mirrorsd={sys.executable}{os.pathsep}.", "there are openvino-genai, onnxruntime-genai, llama.cpp"),
        (f"openvino-genai={sys.executable}{os.pathsep}nowhere", "there is no nowhere"),
        (
            f"llama.cpp=nowhere{os.pathsep}m.gguf",
            r"searched as the file nowhere, as nowhere.llama-server and as 'nowhere'",
        ),
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


PARENT = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
print(json.dumps({"versions": {"child": child.pid}}), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups of processes")
def test_what_a_hanging_peer_started_is_killed_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "parent.py"
    path.write_text(PARENT, encoding="utf-8")
    monkeypatch.setattr(peers, "WORKER", path)
    hanging = start(tmp_path, draft=None)
    child = hanging.wait_until_ready()["child"]
    monkeypatch.setattr(peers, "_END_S", 0.2)
    hanging.close()
    assert is_soon_gone(child)


LOADING = """
import subprocess, sys, time
from pathlib import Path
from mirrorsd.cli.bench import peer_worker

def load(model, *others):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(model).write_text(str(child.pid))
    time.sleep(60)

peer_worker.RUNTIMES["openvino-genai"] = load
sys.argv[1:] = ["openvino-genai", sys.argv[1]]
peer_worker.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups of processes")
def test_a_peer_that_loads_for_nobody_any_more_ends_with_what_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "child"
    words = [sys.executable, "-c", LOADING, str(noted)]
    loading = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    while not (noted.exists() and noted.read_text(encoding="utf-8")):
        assert loading.poll() is None
        time.sleep(0.05)
    assert loading.stdin is not None
    loading.stdin.close()  # as where `bench` was killed
    assert loading.wait(30) == -signal.SIGKILL
    assert is_soon_gone(int(noted.read_text(encoding="utf-8")))


def is_soon_gone(pid: int) -> bool:
    """Whether a process ends within seconds; what nobody waits for counts as ended."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_llama_cpp_s_server_is_asked_from_our_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "said.py"
    said = "import json, sys; print(json.dumps({'versions': {'python': sys.executable, 'words': sys.argv[1:]}}))"
    path.write_text(said, encoding="utf-8")
    monkeypatch.setattr(peers, "WORKER", path)
    server, model = tmp_path / "llama-server", tmp_path / "m.gguf"
    option = PeerOption(runtime="llama.cpp", program=server, model=model, draft=model)
    peer = Peer(option, str, ends=[2], context=64, threads=3, drafted=5)
    versions = peer.wait_until_ready()
    peer.close()
    words = versions["words"]
    assert versions["python"] == sys.executable
    assert words[:6] == ["llama.cpp", str(model), "--threads", "3", "--draft", str(model)]
    assert json.loads(words[7]) == {"server": str(server), "context": 64, "num_drafted": 5}


def test_a_worker_s_own_folder_hides_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    own = str(Path(peer_worker.__file__).parent)
    monkeypatch.setattr(sys, "path", [own, "", os.sep])
    peer_worker.leave_own_folder()
    assert own not in sys.path
    assert os.sep in sys.path
