"""A text that outgrows the draft's first capacity, with the real OpenVINO: plain until the next one is there."""

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline, MirrorSession
from mirrorsd.devices.openvino.draft_compiler import DraftCompiler

PROMPT = [3 + 7 * number % 290 for number in range(300)]
METHODS = ("serial", "mirror", "auto")


@pytest.fixture
def pipe(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu", use_tuned=False) as pipe:
        yield pipe


def text(pipe: MirrorPipeline, method: str) -> tuple[list[int], list[int]]:
    """Tokens of a text that needs the second capacity, and the windows of its steps."""
    result = pipe.generate(token_ids=PROMPT, max_new_tokens=120, ignore_eos=True, method=method)
    return result.token_ids, [step.num_window for step in result.steps]


@pytest.mark.parametrize("method", METHODS)
def test_a_long_prompt_waits_for_nothing(pipe: MirrorPipeline, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = text(pipe, "plain")
    may_go = threading.Event()
    warm_up = DraftCompiler.warm_up

    def late(shapes: DraftCompiler, *shape: int) -> None:
        assert may_go.wait(60.0)
        warm_up(shapes, *shape)

    monkeypatch.setattr(DraftCompiler, "warm_up", late)
    tokens, windows = text(pipe, method)
    assert tokens == plain
    assert set(windows) == {0}
    may_go.set()
    pipe.engine.preparing_worker.run(lambda: None)
    tokens, windows = text(pipe, method)
    assert tokens == plain
    assert max(windows) > 0 or method == "auto"


@pytest.mark.parametrize("method", METHODS)
def test_the_draft_joins_when_its_shapes_are_there(pipe: MirrorPipeline, method: str) -> None:
    plain, _ = text(pipe, "plain")
    chunks = pipe.stream(token_ids=PROMPT, max_new_tokens=120, ignore_eos=True, method=method)
    found: list[int] = []
    windows: list[int] = []
    for number, chunk in enumerate(chunks):
        if number == 5:
            pipe.engine.preparing_worker.run(lambda: None)
        if chunk.result is not None:
            found = chunk.result.token_ids
            windows = [step.num_window for step in chunk.result.steps]
    assert found == plain
    assert max(windows[5:]) > 0 or method == "auto"


def test_closing_ends_a_preparation(pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_go = threading.Event(), threading.Event()
    asked: list[tuple[int, ...]] = []
    session = pipe.session()

    def slow(shapes: DraftCompiler, *shape: int) -> None:
        asked.append(shape)
        has_begun.set()
        assert may_go.wait(60.0)

    monkeypatch.setattr(DraftCompiler, "warm_up", slow)
    session.generate(token_ids=PROMPT, max_new_tokens=8, ignore_eos=True, method="serial")
    assert has_begun.wait(60.0)
    session.close()
    pipe.engine.draft_worker.run(lambda: None)
    may_go.set()
    pipe.close()
    assert len(asked) == 1
    assert not pipe.engine.preparing_worker._thread.is_alive()


def test_a_closed_session_leaves_nothing_behind(pipe: MirrorPipeline) -> None:
    kinds = {"TensorCache", "DraftRequest", "PassBuffers", "DraftNoise", "BoundPass", "Tensor"}

    def counted() -> dict[str, int]:
        gc.collect()
        return dict(Counter(name for found in gc.get_objects() if (name := type(found).__name__) in kinds))

    def use(session: MirrorSession) -> None:
        session.generate(token_ids=PROMPT[:20], max_new_tokens=8, ignore_eos=True, method="mirror")

    def close(session: MirrorSession) -> None:
        session.close()
        for worker in (pipe.engine.draft_worker, pipe.engine.target_worker):
            worker.run(lambda: None)

    first = pipe.session()
    use(first)
    assert counted().keys() >= {"TensorCache", "DraftRequest", "PassBuffers", "BoundPass"}, "while it is open"
    close(first)
    before = counted()
    for _ in range(3):
        session = pipe.session()
        use(session)
        close(session)
    assert counted() == before
