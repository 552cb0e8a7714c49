"""The public pipeline on real sessions: streaming, chat, reuse, stop strings, cancel, several sessions."""

import inspect
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

import mirrorsd
from mirrorsd import MirrorPipeline
from mirrorsd.devices import freed_memory
from mirrorsd.graphs.errors import Cancelled, ConfigError, ContextLengthError, GenerationError
from mirrorsd.runtime import loading

PROMPT = "Every morning the fox"
EXACT = {"pad_rows_to": 8}


@pytest.fixture(scope="module")
def pipe(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation=EXACT) as loaded:
        yield loaded


def test_streamed_chunks_are_the_generated_text(pipe: MirrorPipeline) -> None:
    expected = pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True, method="plain")
    chunks = list(pipe.stream(PROMPT, max_new_tokens=40, ignore_eos=True, method="mirror"))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert [token.id for token in tokens] == expected.token_ids
    assert {token.source for token in tokens} <= {"window", "correction"}
    assert [chunk.result is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned here")
def test_a_whole_text_goes_to_the_targets_cores_once(pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    move, here, usual, moves = os.sched_setaffinity, threading.get_ident(), os.sched_getaffinity(0), list[set[int]]()

    def moved(process: int, cores: set[int]) -> None:
        if threading.get_ident() == here:
            moves.append({*cores})
        move(process, cores)

    monkeypatch.setattr(os, "sched_setaffinity", moved)
    pipe.generate(PROMPT, max_new_tokens=20, ignore_eos=True, method="plain")
    assert len(moves) <= 2
    assert os.sched_getaffinity(0) == usual
    for _ in pipe.stream(PROMPT, max_new_tokens=3, ignore_eos=True, method="plain"):
        assert os.sched_getaffinity(0) == usual


def test_second_turn_reuses_the_first(pipe: MirrorPipeline) -> None:
    messages = [{"role": "user", "content": "Who lived in the forest?"}]
    first = pipe.generate(messages=messages, max_new_tokens=12, ignore_eos=True)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    second = pipe.generate(messages=messages, max_new_tokens=12, ignore_eos=True)
    assert second.stats.num_reused_tokens >= first.stats.num_prompt_tokens


def test_stop_string_ends_the_text_before_it(pipe: MirrorPipeline) -> None:
    whole = pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    stop = whole.text[10:13]
    result = pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True, stop_strings=(stop,))
    assert result.stop_reason == "stop_string"
    assert result.text == whole.text[: whole.text.index(stop)]


def test_closing_a_stream_leaves_the_pipeline_usable(pipe: MirrorPipeline) -> None:
    expected = pipe.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    stream = pipe.stream(PROMPT, max_new_tokens=400, ignore_eos=True, method="mirror")
    next(stream)
    stream.close()
    assert pipe.generate(PROMPT, max_new_tokens=30, ignore_eos=True).token_ids == expected.token_ids


def test_cancel_from_another_thread(pipe: MirrorPipeline) -> None:
    stream = pipe.stream(PROMPT, max_new_tokens=450, ignore_eos=True)
    next(stream)
    timer = threading.Timer(0.02, pipe.cancel)
    timer.start()
    with pytest.raises(Cancelled, match="Cancelled after"):
        list(stream)
    timer.join()
    assert pipe.generate(PROMPT, max_new_tokens=5, ignore_eos=True).num_tokens == 5


def test_two_sessions_at_once_give_their_own_texts(pipe: MirrorPipeline) -> None:
    prompts = ["Once upon a time", "The old heron said"]
    settings = {"max_new_tokens": 60, "ignore_eos": True}
    expected = [pipe.generate(prompt, **settings, method="plain").token_ids for prompt in prompts]
    sessions = [pipe.session() for _ in prompts]
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(session.generate, prompt, **settings, method="mirror")
            for session, prompt in zip(sessions, prompts, strict=True)
        ]
        assert [future.result().token_ids for future in futures] == expected
    for session in sessions:
        session.close()
    with pytest.raises(GenerationError, match="closed"):
        sessions[0].generate(PROMPT)


def test_requests_that_cannot_be_served(pipe: MirrorPipeline) -> None:
    with pytest.raises(GenerationError, match="exactly one of prompt, messages and token_ids; found none"):
        pipe.generate()
    with pytest.raises(GenerationError, match="prompt is empty"):
        pipe.generate("")
    with pytest.raises(GenerationError, match=r"token_ids must lie in 0 .. 299"):
        pipe.generate(token_ids=[1, 300])
    with pytest.raises(ContextLengthError, match=r"context length is 512 tokens.*--context"):
        pipe.generate("fox " * 600)
    with pytest.raises(ConfigError, match="no field 'max_length'"):
        pipe.generate(PROMPT, max_length=3)


def test_text_that_outgrows_a_draft_capacity_stays_exact(pipe: MirrorPipeline) -> None:
    """The draft's cache moves from 256 to 512 slots in mid-generation."""
    settings = {"max_new_tokens": 400, "ignore_eos": True}
    expected = pipe.generate(PROMPT, **settings, method="plain")
    assert pipe.generate(PROMPT, **settings, method="mirror").token_ids == expected.token_ids


def test_a_program_may_change_its_folder(tiny_bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of the draft are opened as texts need them, and what is learned is kept at the end."""
    monkeypatch.chdir(tiny_bundle.parent)
    with MirrorPipeline.load(tiny_bundle.name, device_map="cpu", speculation=EXACT) as pipe:
        monkeypatch.chdir("/")
        found = pipe.generate(PROMPT, max_new_tokens=400, ignore_eos=True, method="mirror")
        assert found.stats.warnings == []


def test_a_text_that_ends_within_its_prompt_has_figures(pipe: MirrorPipeline) -> None:
    """Its deadline comes before anything of the prompt is read."""
    found = pipe.generate(PROMPT * 40, max_new_tokens=4, deadline_s=1e-6)
    assert found.stop_reason == "deadline" and not found.token_ids
    assert 0 <= found.stats.prefill_ms <= 1e3 * found.stats.seconds
    assert found.stats.tokens_per_second == 0


def test_a_trace_is_written(pipe: MirrorPipeline, tmp_path: Path) -> None:
    result = pipe.generate(PROMPT, max_new_tokens=20, ignore_eos=True, method="mirror")
    result.write_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 500


@pytest.mark.parametrize("is_wanted", [True, False])
def test_weights_go_to_huge_pages_unless_the_card_says_no(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_wanted: bool
) -> None:
    card = tmp_path / "pages.toml"
    card.write_text(f"[target]\nhuge_pages = {str(is_wanted).lower()}\n")
    monkeypatch.setattr("mirrorsd.runtime.loading.use_huge_pages", lambda due, rest: 8 << 20)
    with MirrorPipeline.load(tiny_bundle, device_map=str(card)) as loaded:
        loaded.engine.beside.settle()
        assert ("huge pages: 8 MiB" in loaded.placement) is is_wanted


@pytest.mark.parametrize(("every_s", "times"), [(0.0, 1), (1e9, 0)])
def test_what_a_closed_session_leaves_free_goes_back_to_the_system_now_and_then(
    pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch, every_s: float, times: int
) -> None:
    given: list[int] = []
    monkeypatch.setattr(freed_memory, "EVERY_S", every_s)
    monkeypatch.setattr(freed_memory, "_of_glibc", lambda _: given.append)
    session = pipe.session()
    session.generate(PROMPT, max_new_tokens=2)
    session.close()
    pipe.engine.preparing_worker.run(lambda: None)
    assert len(given) == times


def test_a_drawn_seed_is_told_and_makes_the_text_again(pipe: MirrorPipeline) -> None:
    settings = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 1.5}
    drawn = [pipe.generate(PROMPT, **settings) for _ in range(3)]
    assert len({tuple(result.token_ids) for result in drawn}) == len({result.seed for result in drawn}) == 3
    assert pipe.generate(PROMPT, **settings, seed=drawn[0].seed, method="plain").token_ids == drawn[0].token_ids
    assert pipe.generate(PROMPT, max_new_tokens=3).seed is None


def test_what_is_asked_is_checked_before_anything_runs(pipe: MirrorPipeline) -> None:
    with pytest.raises(ConfigError, match=r"top_p is 0.9, but this text is not sampled"):
        pipe.generate(PROMPT, top_p=0.9)
    with pytest.raises(GenerationError, match=r"prompt is 5; allowed: a text"):
        pipe.generate(5)
    with pytest.raises(GenerationError, match=r"token_ids\[0\] is 1.7"):
        pipe.generate(token_ids=[1.7])


def test_a_plain_stop_string_is_not_taken_apart(pipe: MirrorPipeline) -> None:
    whole = pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True).text
    stop = whole[10:14]
    result = pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True, stop_strings=stop)
    assert (result.text, result.stop_reason) == (whole[: whole.index(stop)], "stop_string")


def test_every_token_knows_its_source_and_its_part_of_the_text(tiny_bundle: Path) -> None:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        result = pipe.generate("Once upon a time", method="mirror", max_new_tokens=24, ignore_eos=True)
        assert [token.id for token in result.tokens] == result.token_ids
        assert "".join(token.text for token in result.tokens) == result.text
        assert {token.source for token in result.tokens} <= {"window", "correction", "plain"}
        assert "<svg" in result._repr_html_()
        assert repr(pipe) == "<MirrorPipeline: target and draft on cpu, shared>"
    assert repr(pipe).endswith(", closed>")


def test_a_bundle_is_tuned_for_later_loads(tiny_bundle: Path, own_cache: Path) -> None:
    shares: list[tuple[str, float]] = []
    found = mirrorsd.tune(
        tiny_bundle,
        ["Once upon a time"],
        device_map="cpu",
        max_new_tokens=8,
        on_progress=lambda *told: shares.append(told),
    )
    assert found.card == "cpu"
    assert ("recording", 0.0) in shares
    assert {share for _, share in shares} >= {0.0, 1.0}
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        assert "speculation: tuned on this machine" in pipe.placement


def test_nothing_is_measured_that_cannot_be_kept(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected a list of prompts"):
        mirrorsd.tune(tiny_bundle, "Once upon a time")
    monkeypatch.setenv("MIRRORSD_CACHE", "/proc/nowhere")
    with pytest.raises(ConfigError, match=r"cannot be written into .*MIRRORSD_CACHE"):
        mirrorsd.tune(tiny_bundle, device_map="cpu")


def test_what_a_row_costs_is_known_at_load(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that windows are weighed from the first text on; its text is plain decoding's own."""
    monkeypatch.setattr(loading, "measure_passes", inspect.unwrap(loading.measure_passes))
    clock = count(step=0.001)  # a slow first pass would take the time of others
    monkeypatch.setattr(loading, "perf_counter", lambda: next(clock))
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        curve = pipe.engine.known.target_ms
        assert [rows for rows, _ in curve[:2]] == [1, 2] and all(ms > 0 for _, ms in curve)
        texts = {
            tuple(pipe.generate("Once", max_new_tokens=24, method=m).token_ids) for m in ("plain", "auto", "serial")
        }
    assert len(texts) == 1
