"""Requests as a program makes them: deadlines, cancel tokens, event loops, seats, saved conversations."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from waiting import Entered

from mirrorsd import (
    BundleError,
    Cancelled,
    CancelToken,
    ConfigError,
    GenerationError,
    MirrorPipeline,
    MirrorSession,
    SpeculationConfig,
)
from mirrorsd.runtime.reporting.results import Chunk

METHODS = ("plain", "serial", "mirror", "auto")
PROMPT = "Every morning the fox"


@pytest.fixture(scope="module")
def pipe(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as loaded:
        yield loaded


def test_a_deadline_ends_the_text_where_it_is(pipe: MirrorPipeline) -> None:
    whole = pipe.generate(PROMPT, max_new_tokens=450, ignore_eos=True, method="plain")
    for method in METHODS:
        result = pipe.generate(PROMPT, max_new_tokens=450, ignore_eos=True, method=method, deadline_s=0.01)
        assert result.stop_reason == "deadline"
        assert result.token_ids == whole.token_ids[: result.num_tokens]
        assert whole.text.startswith(result.text.rstrip("\ufffd")), "it may end within a character"
    assert pipe.generate(PROMPT, max_new_tokens=20, ignore_eos=True).token_ids == whole.token_ids[:20]


def test_a_token_stops_its_own_requests_alone_and_tells_what_there_was(pipe: MirrorPipeline) -> None:
    token = CancelToken()
    stream = pipe.stream(PROMPT, max_new_tokens=450, ignore_eos=True, cancel=token)
    other = pipe.stream(PROMPT, max_new_tokens=30, ignore_eos=True)
    first = next(stream)
    next(other)
    token.cancel()
    with pytest.raises(Cancelled) as cancelled:
        list(stream)
    result = cancelled.value.result
    assert result.stop_reason == "cancelled"
    assert result.text.startswith(first.text)
    assert list(other)[-1].result is not None
    with pytest.raises(Cancelled):
        pipe.generate(PROMPT, cancel=token)


def test_an_async_stream_leaves_the_event_loop_free(pipe: MirrorPipeline) -> None:
    async def read() -> tuple[str, int]:
        ticks, texts = 0, []

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        async for chunk in pipe.astream(PROMPT, max_new_tokens=60, ignore_eos=True):
            texts += [chunk.text]
        ticking.cancel()
        return "".join(texts), ticks

    text, ticks = asyncio.run(read())
    assert text == pipe.generate(PROMPT, max_new_tokens=60, ignore_eos=True).text
    assert ticks > 3


def test_cancelling_an_async_task_stops_its_request(pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is held behind its first chunk until the task is cancelled; the next request need not wait for it."""
    tokens, is_cancelled = dict[int, int](), Entered()
    stream = MirrorSession._stream

    def held(session: MirrorSession, request: Any) -> Iterator[Chunk]:
        most = request.config.max_new_tokens
        for chunk in stream(session, request):
            tokens[most] = tokens.get(most, 0) + len(chunk.tokens)
            assert most == 2 or is_cancelled.wait(60)
            yield chunk

    async def leave() -> None:
        task = asyncio.create_task(pipe.agenerate(PROMPT, max_new_tokens=450, ignore_eos=True))
        assert await asyncio.to_thread(is_cancelled.is_awaited.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        is_cancelled.set()
        await pipe.agenerate(PROMPT, max_new_tokens=2, ignore_eos=True)

    monkeypatch.setattr(MirrorSession, "_stream", held)
    asyncio.run(leave())
    assert tokens[450] < 450
    assert tokens[2] == 2


def test_errors_of_an_async_request_come_where_it_is_awaited(pipe: MirrorPipeline) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        asyncio.run(pipe.agenerate(PROMPT, temperature=-1))


def test_texts_go_to_the_seat_that_has_their_beginning(pipe: MirrorPipeline) -> None:
    options = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    tales = [pipe.encode(text) for text in ("Once upon a time there was a fox", "The old heron of the dark river")]
    seats = pipe.seats(2)
    for tale in tales:
        with seats.take(tale, timeout_s=0) as session:
            assert session.generate(token_ids=tale, **options).stats.num_reused_tokens == 0
    for tale in reversed(tales):
        with seats.take([*tale, 70, 71]) as session:
            assert session.generate(token_ids=[*tale, 70, 71], **options).stats.num_reused_tokens == len(tale)
    with seats.take(tales[0]) as first, seats.take(tales[0]) as second:
        assert (first is second, seats.num_free) == (False, 0)
        with pytest.raises(TimeoutError, match="All 2 seats are taken"), seats.take(tales[1], timeout_s=0.01):
            pass
    assert (seats.num_free, seats.num_seats) == (2, 2)
    assert seats.bytes_per_seat > 100_000
    seats.close()
    with pytest.raises(ConfigError, match=r"seats.count is 0; allowed: 1 or more"):
        pipe.seats(0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "sampled"])
def test_seats_copy_a_beginning_that_another_one_has_read(
    pipe: MirrorPipeline, method: str, sampling: dict[str, Any]
) -> None:
    """Also while the other one is writing, whose own text goes on as it would."""
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "method": method, **sampling}
    system = "You are the old heron of the dark river. Say what you have seen. "
    one, other = pipe.encode(system + "What does the fox do?"), pipe.encode(system + "Who came by?")
    num_common = len(pipe.encode(system)) - 1
    with pipe.session() as alone:
        expected = [alone.generate(token_ids=ids, **options).token_ids for ids in (one, other)]
    seats = pipe.seats(2)
    with seats.take(one) as writing:
        stream = writing.stream(token_ids=one, **options)
        chunks = [next(stream)]
        with seats.take(other) as following:
            assert num_common <= following.num_cached_tokens < len(other)
            second = following.generate(token_ids=other, **options)
        chunks += stream
    assert num_common <= second.stats.num_reused_tokens < len(other) - 1
    assert [chunks[-1].result and chunks[-1].result.token_ids, second.token_ids] == expected
    seats.close()


def test_the_draft_follows_as_well_and_guesses_what_it_would(pipe: MirrorPipeline) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "method": "serial"}
    system = "You are the old heron of the dark river. Say what you have seen. " * 2
    one, other = pipe.encode(system + "What does the fox do?"), pipe.encode(system + "Who came by?")
    with pipe.session() as alone:
        alone._seat._draft_session.prepare(400)  # else the first texts are decoded plainly meanwhile
        expected = alone.generate(token_ids=other, **options)
    seats = pipe.seats(2)
    with seats.take(one) as first:
        first.generate(token_ids=one, **options)
        with seats.take(other) as second:
            chain = second._seat._drafter.chain
            assert pipe.engine.draft_worker.run(lambda: chain.num_fed) == second.num_cached_tokens
            found = second.generate(token_ids=other, **options)
    assert (found.token_ids, found.stats.steps) == (expected.token_ids, expected.stats.steps)
    seats.close()


def test_small_requests_do_not_cost_a_long_conversation_its_seat(pipe: MirrorPipeline) -> None:
    """Until there were so many that it will probably not go on."""
    seats, long = pipe.seats(2), list(range(1, 201))
    small = [[250 - number, *range(number + 1, number + 40)] for number in range(12)]
    for asked in (long, *small[:3]):
        with seats.take(asked) as session:
            session.generate(token_ids=asked, max_new_tokens=1)
    with seats.take(long) as session:
        assert session.cached_token_ids == long
        session.generate(token_ids=long, max_new_tokens=1)
    for asked in small:
        with seats.take(asked) as session:
            session.generate(token_ids=asked, max_new_tokens=1)
    with seats.take(long) as session:
        assert session.cached_token_ids[:1] != long[:1]
    seats.close()


def test_seats_copy_nothing_where_too_little_is_alike(pipe: MirrorPipeline) -> None:
    """A copy waits for its turn at the device, as a part of the prompt would."""
    seats = pipe.seats(2)
    with seats.take(range(1, 30)) as session:
        session.generate(token_ids=list(range(1, 30)), max_new_tokens=1)
    for num_common, num_copied in ((7, 0), (8, 8)):
        with seats.take([*range(1, 1 + num_common), *range(100, 140)]) as session:
            assert session.num_cached_tokens == num_copied
    seats.close()


def test_a_session_follows_others_of_its_own_pipeline(pipe: MirrorPipeline, tiny_bundle: Path) -> None:
    with pipe.session() as session, pipe.session() as other:
        text = session.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        assert other.follow(session, 5)
        assert other.cached_token_ids == session.cached_token_ids[:5]
        assert other.follow(session)
        assert other.cached_token_ids == session.cached_token_ids
        again = other.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        assert (again.token_ids, again.stats.num_reused_tokens) == (text.token_ids, text.stats.num_prompt_tokens - 1)
        session.close()
        assert other.follow(session), "what is closed has nothing"
        assert other.num_cached_tokens == 0
        with (
            MirrorPipeline.load(tiny_bundle, device_map="cpu") as apart,
            apart.session() as stranger,
            pytest.raises(GenerationError, match="of its own pipeline"),
        ):
            other.follow(stranger)


def test_a_saved_conversation_goes_on_elsewhere_with_the_same_text(pipe: MirrorPipeline, tmp_path: Path) -> None:
    options = {"ignore_eos": True, "temperature": 0.8, "seed": 4}
    with pipe.session() as session:
        first = session.generate(PROMPT, max_new_tokens=20, **options)
        num_saved = session.save_cache(tmp_path / "fox.cache")
        assert num_saved >= first.stats.num_prompt_tokens + 19
        text = [*first.prompt_ids, *first.token_ids]
        expected = session.generate(token_ids=text, max_new_tokens=20, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["fox.cache"]
    for method in METHODS:
        with pipe.session() as session:
            assert session.load_cache(tmp_path / "fox.cache") == num_saved
            assert session.cached_token_ids == text[:num_saved]
            result = session.generate(token_ids=text, max_new_tokens=20, method=method, **options)
            assert result.token_ids == expected.token_ids
            assert result.stats.num_reused_tokens == min(num_saved, len(text) - 1)


def test_a_session_that_forgot_reads_the_prompt_anew(pipe: MirrorPipeline) -> None:
    with pipe.session() as session:
        first = session.generate(PROMPT, max_new_tokens=8)
        session.forget()
        assert session.num_cached_tokens == 0
        again = session.generate(PROMPT, max_new_tokens=8)
        assert (again.token_ids, again.stats.num_reused_tokens) == (first.token_ids, 0)
    with pytest.raises(GenerationError, match="closed"):
        session.forget()


def test_a_saved_conversation_that_does_not_fit_is_refused(
    pipe: MirrorPipeline, tiny_bundle: Path, tmp_path: Path
) -> None:
    path = tmp_path / "fox.cache"
    with pipe.session() as session:
        session.generate(PROMPT, max_new_tokens=4)
        session.save_cache(path)
        content = bytearray(path.read_bytes())
        for wrong, message in (
            (content[:-1], "is damaged"),
            (content[:-1] + bytes([content[-1] ^ 1]), "is damaged"),
            (b"something else", "is no saved cache"),
        ):
            (tmp_path / "wrong").write_bytes(wrong)
            with pytest.raises(BundleError, match=message):
                session.load_cache(tmp_path / "wrong")
        with pytest.raises(BundleError, match="cannot be read"):
            session.load_cache(tmp_path / "missing")
        expected = session.generate(PROMPT, max_new_tokens=4).token_ids
    with MirrorPipeline.load(tiny_bundle, device_map="openvino-cpu") as other, other.session() as session:
        with pytest.raises(BundleError, match="was made with another target"):
            session.load_cache(path)
        text = session.generate(PROMPT, max_new_tokens=12, ignore_eos=True, temperature=0.0)
        session.save_cache(path)
        other.generate(PROMPT, max_new_tokens=1)
        with other.session() as new:
            num_loaded = new.load_cache(path)
            again = new.generate(PROMPT, max_new_tokens=12, ignore_eos=True, temperature=0.0)
            assert again.token_ids == text.token_ids
            assert again.stats.num_reused_tokens == min(num_loaded, len(text.prompt_ids) - 1) > 0
    assert pipe.generate(PROMPT, max_new_tokens=4).token_ids == expected


def test_what_was_held_back_is_in_the_result_of_a_text_that_was_stopped(pipe: MirrorPipeline) -> None:
    """The tokens are, too; so the text is what they decode to."""
    asked: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    stop = pipe.generate(PROMPT, **asked).text[:-1] + "\0"  # begins as the text does, and never comes
    cancel = CancelToken()
    with pytest.raises(Cancelled) as cancelled:
        for _ in pipe.stream(PROMPT, **asked, stop_strings=stop, cancel=cancel):
            cancel.cancel()
    result = cancelled.value.result
    assert result is not None and result.token_ids
    assert result.text == pipe.tokenizer.decode(result.token_ids)


def test_how_to_speculate_is_said_whole_or_by_what_differs(pipe: MirrorPipeline) -> None:
    config = SpeculationConfig(gamma=2)
    with closing(pipe.session({"gamma": 2})) as one, closing(pipe.session(config)) as other:
        first, second = (each.generate("x", max_new_tokens=8, method="serial") for each in (one, other))
        assert first.token_ids == second.token_ids
    for wrong in ({"gama": 2}, ["gamma"], 3):
        with pytest.raises(ConfigError, match="speculation"):
            pipe.session(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_tokens is -1"):
        pipe.session().follow(pipe.session(), -1)
