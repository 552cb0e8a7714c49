"""Conversations that share passes: every text is the one alone, whatever the method and whoever comes and goes."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
from fake_pipelines import make_pipeline

from mirrorsd import Cancelled, CancelToken, GenerationConfig, MirrorPipeline
from mirrorsd.bench.claims import soak
from mirrorsd.bench.claims.serving.company import count_different, mixed, open_company
from mirrorsd.devices.draft_memory import DraftPass, TipGuesses
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.ledger import TargetOutput, TargetPass
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.server.bundles.loaded import LoadedBundle, Part, Task
from mirrorsd.server.settings import ServerSettings
from mirrorsd.texts.config import Method

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [
    [{"role": "user", "content": text}] for text in ("Once upon a time", "The fox went", "News of the old heron")
]


@pytest.fixture(scope="module")
def pipe(headed_bundle: tuple[Path, list[int]]) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(headed_bundle[0], device_map="cpu") as pipe:
        yield pipe


def test_all_methods_in_all_ways_say_in_company_what_they_say_alone(pipe: MirrorPipeline) -> None:
    sessions = [pipe.session() for _ in range(8)]
    open_company(pipe)
    company = pipe.engine.target_worker.company
    assert company is not None
    assert company.batch.num_slots == 8
    asked = list(islice(mixed(PROMPTS, pipe.methods, 24), 5 * len(pipe.methods)))
    assert count_different(sessions, asked) == 0
    assert pipe.engine.target_worker.company is company, "no joint pass has failed"
    for session in sessions:
        session.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_sessions_share_passes_and_say_what_they_say_alone(pipe: MirrorPipeline, *, is_async: bool) -> None:
    """A text that is much longer than the others', too: it is the pass's guest."""
    sessions = [pipe.session() for _ in range(4)]
    open_company(pipe)
    batch = pipe.engine.target_worker.company.batch  # type: ignore[union-attr]
    prompts = ["Once upon a time", "The fox went", "News of the old heron", " ".join(["the river"] * 40)]
    options = {"max_new_tokens": 24, "ignore_eos": True, "method": "plain"}
    alone = [session.generate(prompt, **options).token_ids for session, prompt in zip(sessions, prompts, strict=True)]
    sizes: list[int] = []
    run = batch.run

    def counted(passes: Sequence[TargetPass]) -> list[TargetOutput]:
        sizes.append(len(passes))
        return run(passes)

    async def ask() -> list[list[int]]:
        texts = (session.agenerate(prompt, **options) for session, prompt in zip(sessions, prompts, strict=True))
        return [result.token_ids for result in await asyncio.gather(*texts)]

    def ask_threads() -> list[list[int]]:
        with ThreadPoolExecutor(4) as threads:
            jobs = [
                threads.submit(session.generate, prompt, **options)
                for session, prompt in zip(sessions, prompts, strict=True)
            ]
            return [job.result().token_ids for job in jobs]

    with mock.patch.object(batch, "run", counted):
        for _ in range(20):  # on a busy machine one text may be over before the next begins
            assert (asyncio.run(ask()) if is_async else ask_threads()) == alone
            if max(sizes, default=0) > 1:
                break
    assert max(sizes) > 1
    for session in sessions:
        session.close()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_drafts_share_rounds_and_texts_are_those_alone(pipe: MirrorPipeline, settings: dict[str, float]) -> None:
    sessions = [pipe.session() for _ in range(3)]
    open_company(pipe)
    rounds = pipe.engine.draft_model.rounds  # type: ignore[attr-defined]
    prompts = ["Once upon a time", "The fox went", "News of the old heron"]
    options = {"max_new_tokens": 24, "ignore_eos": True, "method": "serial", **settings}
    alone = [session.generate(prompt, **options).token_ids for session, prompt in zip(sessions, prompts, strict=True)]
    sizes: list[int] = []
    run = rounds._joint.run

    def counted(passes: Sequence[DraftPass], *, is_alone: bool) -> list[TipGuesses]:
        sizes.append(len(passes))
        return run(passes, is_alone=is_alone)

    with mock.patch.object(rounds._joint, "run", counted), ThreadPoolExecutor(3) as threads:
        for _ in range(20):  # on a busy machine one text may be over before the next begins
            jobs = [
                threads.submit(session.generate, prompt, **options)
                for session, prompt in zip(sessions, prompts, strict=True)
            ]
            results = [job.result() for job in jobs]
            assert [result.token_ids for result in results] == alone
            assert [result.stats.warnings for result in results] == [[]] * 3
            if max(sizes, default=0) > 1:
                break
    assert max(sizes, default=0) > 1
    for session in sessions:
        session.close()


def test_a_cancelled_text_leaves_the_others_as_they_are(pipe: MirrorPipeline) -> None:
    sessions = [pipe.session() for _ in range(4)]
    open_company(pipe)
    options = {"max_new_tokens": 60, "ignore_eos": True, "method": "plain"}
    alone = sessions[0].generate("Once upon a time", **options).token_ids
    found: list[list[int]] = []
    cancelled: list[Cancelled] = []

    def read(number: int) -> None:
        try:
            for count, chunk in enumerate(sessions[number].stream("Once upon a time", **options)):
                if number == 3 and count == 5:
                    sessions[number].cancel()
                if chunk.result is not None:
                    found.append(chunk.result.token_ids)
        except Cancelled as error:
            cancelled.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 3
    assert len(cancelled) == 1
    assert sessions[3].generate("Once upon a time", **options).token_ids == alone
    for session in sessions:
        session.close()


def test_closed_sessions_give_their_slots_and_caches_back(pipe: MirrorPipeline) -> None:
    first = [pipe.session() for _ in range(4)]
    open_company(pipe)
    options = {"max_new_tokens": 8, "ignore_eos": True, "method": "plain"}
    for _ in range(3):
        threads = [threading.Thread(target=session.generate, args=("The fox",), kwargs=options) for session in first]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for session in first:
            session.close()
        first = [pipe.session() for _ in range(4)]
    pipe.engine.target_worker.run(lambda: None)
    batch = pipe.engine.target_model.open_batch(2)
    assert batch is not None
    for session in first:
        session.close()


@pytest.mark.filterwarnings("ignore:The draft failed")  # one of the faults
def test_a_round_of_the_soak_finds_no_text_that_differs(
    headed_bundle: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last round has a joint pass fail: the texts go on by turns."""
    prompts, report = ROOT / "samples" / "storyteller" / "prompts.jsonl", tmp_path / "soak.json"
    options = ["--no-server", "--minutes", "0", "--tokens", "8", "--prompts", str(prompts), "--output", str(report)]
    monkeypatch.setattr("sys.argv", ["soak.py", str(headed_bundle[0]), *options])
    with pytest.warns(RuntimeWarning, match="take turns from here on"):
        soak.main()
    rounds = json.loads(report.read_text(encoding="utf-8"))["rounds"]
    assert len(rounds) == 2
    assert (rounds[1]["different"], rounds[1]["failed"]) == (0, 0)
    assert 0 < rounds[0]["texts"] < rounds[1]["texts"]


@pytest.mark.parametrize("method", ["plain", "auto", "serial", "mirror"])
def test_several_answers_are_written_in_one_pass_and_are_those_alone(pipe: MirrorPipeline, method: Method) -> None:
    options = [{"method": method, **way} for way in ({}, {"temperature": 0.8, "seed": 3})]
    settings = {"max_new_tokens": 24, "ignore_eos": True, "messages": PROMPTS[0]}
    with pipe.session() as session, mock.patch.object(MirrorSession, "_beside", lambda *_: []):
        alone = [session.generate_several(5, **settings, **way) for way in options]
    with pipe.session() as session:
        pipe.engine.open_company(5)
        pipe.engine.preparing_worker.run(lambda: None)
        company = pipe.engine.target_worker.company
        assert company is not None
        meeting = mock.patch.object(company, "seconds_to_wait", lambda present: 0.1 if len(present) < 2 else 0.0)
        with meeting, mock.patch.object(company.batch, "run", wraps=company.batch.run) as run:
            together = [session.generate_several(5, **settings, **way) for way in options]
        assert max(len(call.args[0]) for call in run.call_args_list) > 1
    for expected, found in zip(alone, together, strict=True):
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.seed for one in found] == [one.seed for one in expected]
        last_rows = 2 if method == "auto" else 1  # a head that auto tries guesses from the last row but one
        assert all(one.stats.num_reused_tokens >= one.stats.num_prompt_tokens - last_rows for one in found[1:])


def test_several_answers_are_written_where_there_is_no_room_for_more_caches(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise DeviceError("there is no room for a cache")

    options = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    with make_pipeline(tiny_bundle) as pipe:
        expected = [answer.token_ids for answer in pipe.generate_several(3, "x", **options)]
        monkeypatch.setattr(pipe.engine, "num_sharing", lambda wanted: wanted)
        monkeypatch.setattr(pipe.engine.target_model, "new_session", refuse)
        assert [answer.token_ids for answer in pipe.generate_several(3, "x", **options)] == expected


def test_choices_of_an_answer_are_written_in_one_pass_on_free_seats(
    pipe: MirrorPipeline, headed_bundle: tuple[Path, list[int]]
) -> None:
    """One after another as the client reads them, and those of one seat alone; every seat is free again."""
    configs = [GenerationConfig(max_new_tokens=24, ignore_eos=True, temperature=0.8, seed=seed) for seed in range(5)]
    ids = pipe.encode(messages=PROMPTS[0])
    with pipe.session() as session:
        alone = [session.generate(token_ids=ids, config=config).token_ids for config in configs]

    async def ask(bundle: LoadedBundle) -> list[list[int]]:
        found: list[list[int]] = []
        async with bundle.events(Task(token_ids=ids, configs=configs, cancel=CancelToken())) as events:
            async for event in events:
                if isinstance(event, Part):
                    found += [[]] * (event.number + 1 - len(found))
                    assert event.number == len(found) - 1, "choices come in their order"
                    found[-1] = found[-1] + [token.id for token in event.chunk.tokens]
        return found

    with mock.patch.object(pipe, "close"):
        bundle = LoadedBundle("story", headed_bundle[0], pipe, ServerSettings(seats=5))
        try:
            pipe.engine.open_company(5)
            pipe.engine.preparing_worker.run(lambda: None)
            company = pipe.engine.target_worker.company
            assert company is not None
            with mock.patch.object(company.batch, "run", wraps=company.batch.run) as run:
                for _ in range(20):  # on a busy machine one text may be over before the next begins
                    assert asyncio.run(ask(bundle)) == alone
                    if any(len(call.args[0]) > 1 for call in run.call_args_list):
                        break
            assert max(len(call.args[0]) for call in run.call_args_list) > 1
            assert bundle._seats.num_free == 5
        finally:
            bundle.close()
