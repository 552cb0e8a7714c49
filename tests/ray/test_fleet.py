"""The sample on Ray Serve, on this machine: a replica is killed in the middle of texts, which go on at the other."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")
FLEET = Path(__file__).resolve().parents[2] / "samples" / "ray_serve" / "fleet.py"
URL = "http://127.0.0.1:8000/v1"
MESSAGES = [{"role": "user", "content": "fox"}]


@pytest.fixture(scope="module")
def fleet(tiny_bundle: Path) -> Iterator[psutil.Process]:
    """Ray with two replicas; the process above all of its own."""
    words = [str(FLEET), f"tiny={tiny_bundle}", "--cores", "0.4", "--gigabytes", "0.5", "--replicas", "2", "2"]
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    with subprocess.Popen([sys.executable, *words], env=variables) as process:
        try:
            until = time.monotonic() + 180
            while not is_ready():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.5)
            yield psutil.Process(process.pid)
        finally:
            whole = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            psutil.wait_procs(whole, timeout=20)
            for left in whole:
                if left.is_running():
                    left.kill()


def is_ready() -> bool:
    try:
        return bool(ask(max_tokens=1))
    except OSError:
        return False


def ask(**more: Any) -> Any:
    body = {"model": "tiny", "messages": MESSAGES, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{URL}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def replicas(fleet: psutil.Process) -> list[psutil.Process]:
    names = [(process, " ".join(process.cmdline())) for process in fleet.children(recursive=True)]
    return [process for process, name in names if "ServeReplica:replicas:Replica" in name]


def text_of(answer: bytes) -> str:
    if not answer.startswith(b"data: "):
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    assert b"data: [DONE]" in answer
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_texts_outlive_their_replica(fleet: psutil.Process) -> None:
    ways: list[dict[str, Any]] = [
        {"stream": number % 2 == 0, "temperature": 1.0, "seed": number, "method": ("plain", "mirror")[number // 2 % 2]}
        for number in range(8)
    ]
    expected = [text_of(ask(max_tokens=400, **way)) for way in ways]
    before = replicas(fleet)
    assert len(before) == 2
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, max_tokens=400, **way) for way in ways]
        time.sleep(0.5)
        before[0].kill()
        found = [text_of(future.result()) for future in running]
    assert [one == other for one, other in zip(found, expected, strict=True)] == [True] * 8


def test_who_asks_while_a_replica_starts_again_is_answered(fleet: psutil.Process) -> None:
    for _ in range(20):
        assert text_of(ask(max_tokens=4, temperature=0))
