"""Windows from a head: the rows that it reads, what it keeps from text to text, and what its failures cost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.errors import Cancelled, ConfigError, DeviceError
from mirrorsd.graphs.manifest import Head, SourceModel
from mirrorsd.runtime.backends.protocol import HeadGuesses
from mirrorsd.runtime.decoding.head import HeadLink
from mirrorsd.testing.fake import FakeDraft, FakeTarget
from mirrorsd.texts.speculation import check_head

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KINDS = {"medusa": 0, "hydra": 1, "eagle3": 1, "block": 2, "streaming": 2}
"""Layers that keep a cache."""


def head_of(kind: str, length: int = 4) -> Head:
    layers = KINDS[kind]
    shape = HeadShape(
        taps=(2,), length=length, num_candidates=1, num_layers=layers, num_kv_heads=min(layers, 1), head_dim=8
    )
    source = SourceModel(name="fake", family=kind, licence="unknown", num_parameters=1)
    return Head(kind=kind, file="", source=source, shape=shape, vocabulary="own", num_tokens=16)


@pytest.fixture
def make_headed(make_bench: Callable[..., Any], draft_handler: Callable[..., Any]) -> Callable[..., Any]:
    """A bench whose target has a head of each kind, which is right this often."""

    def make(of_heads: float = 0.7, **settings: Any) -> Any:
        bench = make_bench(**settings)
        for kind in KINDS:
            bench.target.add_head(head_of(kind), draft_handler(of_heads, 3))
        return bench

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.8, "seed": 5, "top_k": 4}])
@pytest.mark.parametrize("hit_rate", [0.0, 0.6, 1.0])
def test_texts_are_those_of_plain_decoding(
    make_headed: Callable[..., Any], kind: str, sampling: dict[str, Any], hit_rate: float
) -> None:
    bench = make_headed(hit_rate)
    expected = bench.decode(PROMPT, "plain", **sampling)
    assert bench.decode(PROMPT, kind, **sampling) == expected
    if not sampling and hit_rate:
        accepted = [step.num_accepted for step in bench.last_request.steps]
        assert max(accepted) == 4, "a head that is right saves passes"
        assert hit_rate == 1.0 or min(accepted[:-1]) < 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 128])
def test_prompts_read_in_chunks_of_any_size_give_the_same_first_window(
    make_headed: Callable[..., Any], kind: str, rows: int
) -> None:
    bench = make_headed(1.0, prefill_rows=rows)
    assert bench.decode(PROMPT, kind) == bench.decode(PROMPT, "plain")
    bench.decode(PROMPT, kind)
    assert bench.last_request.steps[0].num_window == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token_has_no_row_to_guess_from(make_headed: Callable[..., Any], kind: str) -> None:
    bench = make_headed(1.0)
    assert bench.decode([7], kind) == bench.decode([7], "plain")
    bench.decode([7], kind)
    assert [step.num_window for step in bench.last_request.steps[:2]] == [0, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["same", "plain", "mirror"])
def test_a_conversation_goes_on_whatever_read_its_beginning(
    make_headed: Callable[..., Any], kind: str, before: str
) -> None:
    """What another method had the target read, the head has not: those rows pass again, and only those."""
    bench = make_headed(0.8)
    turn = PROMPT + bench.decode(PROMPT, kind if before == "same" else before, max_new_tokens=12) + [2, 7]
    expected = make_headed(0.8).decode(turn, "plain")
    assert bench.decode(turn, kind) == expected
    reused = bench.last_request.num_reused
    if not KINDS[kind]:
        assert reused >= len(PROMPT) + 10, "it only needs the last row"
    else:
        assert (reused >= len(PROMPT) + 8) == (before == "same")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_parts_from_the_one_before_is_read_from_there(make_headed: Callable[..., Any], kind: str) -> None:
    bench = make_headed(0.8)
    bench.decode(PROMPT, kind)
    other = [*PROMPT[:5], 8, 8, 8]
    assert bench.decode(other, kind) == make_headed().decode(other, "plain")
    assert bench.last_request.num_reused == (5 if not KINDS[kind] else 4), "row 4 was followed by another token"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", range(6))
def test_an_interrupted_text_leaves_nothing_wrong_behind(
    make_headed: Callable[..., Any], kind: str, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_headed(0.8, prefill_rows=3)
    own, count = FakeTarget.guess, 0

    def guess(self: FakeTarget, *arguments: Any, **options: Any) -> HeadGuesses:
        nonlocal count
        found = own(self, *arguments, **options)
        count += 1
        if count == 1 + moment:
            bench.cancel.set()
            raise DeviceError("terminated")
        return found

    monkeypatch.setattr(FakeTarget, "guess", guess)
    with pytest.raises(Cancelled):
        bench.decode(PROMPT, kind)
    bench.cancel.clear()
    assert bench.decode(PROMPT, kind) == make_headed().decode(PROMPT, "plain")
    assert bench.last_request.steps[0].num_window


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_fails_costs_speed_and_is_used_again(
    make_headed: Callable[..., Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_headed(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(FakeTarget, "guess", _fail)
        with pytest.warns(RuntimeWarning, match="The head failed \\(no numbers\\).*decoded plainly"):
            found = bench.decode(PROMPT, kind)
        assert bench.seat.draft_failure == "no numbers"
    assert found == bench.decode(PROMPT, "plain")
    assert bench.seat.draft_failure is None
    assert bench.decode(PROMPT, kind) == found
    assert max(step.num_accepted for step in bench.last_request.steps) == 4


def _fail(*arguments: Any, **options: Any) -> HeadGuesses:
    raise DeviceError("no numbers")


def test_windows_are_cut_where_rows_are_known_to_cost_much(make_headed: Callable[..., Any]) -> None:
    """A pass of n rows takes n times as long: nothing that is ever wrong is worth its row."""
    lengths = {}
    for name, target_ms in {"flat": ((1.0, 1.0), (32.0, 1.01)), "steep": ((1.0, 1.0), (32.0, 32.0))}.items():
        bench = make_headed(0.3)
        expected = bench.decode(PROMPT, "plain")
        bench.engine.known.target_ms = target_ms
        assert bench.decode(PROMPT, "eagle3") == expected
        lengths[name] = np.mean([step.num_window for step in bench.last_request.steps[:-4]])
        assert set(bench.engine.known.lengths_of_heads) == {("eagle3", False)}
    assert lengths["flat"] == 4
    assert lengths["steep"] < 1


def test_noise_of_the_windows_own_positions_reaches_the_head(
    make_headed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, given = make_headed(0.5), {}
    own = FakeTarget.guess

    def guess(self: FakeTarget, kind: str, tokens: NDArray[np.int64], start: int, **options: Any) -> HeadGuesses:
        given[start + len(tokens) + 1] = options["noise"]
        return own(self, kind, tokens, start, **options)

    monkeypatch.setattr(FakeTarget, "guess", guess)
    bench.decode(PROMPT, "medusa", temperature=0.5, seed=9, top_k=3)
    source = bench.last_request.chooser.noise_source()
    for position, noise in given.items():
        expected = np.stack([source(position + row, 16) for row in range(4)])
        np.testing.assert_allclose(noise, expected, rtol=1e-6)
    assert len(given) > 5
    given.clear()
    bench.decode(PROMPT, "medusa")
    assert set(map(type, given.values())) == {type(None)}


def test_rows_that_need_not_pass_again() -> None:
    link = HeadLink("eagle3", _HeadedTarget())  # type: ignore[arg-type]
    link._text[:4], link._num_read = [5, 6, 7, 8], 3
    assert [link.num_read(np.array(text)) for text in ([5, 6, 7, 9, 9], [5, 6, 7, 8, 1], [5], [4, 6, 7])] == [
        2,
        3,
        0,
        0,
    ]


class _HeadedTarget:
    context = 16

    def __init__(self) -> None:
        self.heads = {"eagle3": head_of("eagle3")}


def test_a_method_without_its_head_says_what_to_export(bundle: Path) -> None:
    manifest = read_bundle(bundle)
    with pytest.raises(ConfigError, match=r"no such head \(it has: none\).*train head --kind eagle3.*--head FOLDER"):
        check_head("eagle3", manifest, ())
    check_head("auto", manifest, ())


def test_a_head_beside_a_target_on_openvino_says_where_it_runs(bundle: Path) -> None:
    manifest = replace(read_bundle(bundle), heads=(head_of("eagle3"),))
    with pytest.raises(ConfigError, match=r"runs on ONNX Runtime.*choose another device map"):
        check_head("eagle3", manifest, ())


SIZE_BLIND = ((1.0, 1000.0), (33.0, 1000.0))
"""A second for a pass, whatever its rows."""


def slow_guesses(bench: Any, seconds: float) -> None:
    """Have every run of a head take so long, by the clock of the bench."""
    guess = bench.target.guess

    def slowly(*arguments: Any, **options: Any) -> HeadGuesses:
        bench.target.seconds += seconds
        return guess(*arguments, **options)

    bench.target.guess = slowly


def useless(bench: Any) -> list[int]:
    """A draft that takes half a pass, and is never right."""
    bench.target.seconds += 0.5
    return [99 % 16, 0, 0, 0]


@pytest.mark.parametrize("takes_turns", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.8, "seed": 5, "top_k": 4}])
@pytest.mark.parametrize("hit_rates", [(0.0, 0.0), (0.0, 0.9), (0.9, 0.0), (0.7, 0.8)])
def test_auto_writes_plain_text_with_any_heads_and_any_draft(
    make_headed: Callable[..., Any], hit_rates: tuple[float, float], sampling: dict[str, Any], *, takes_turns: bool
) -> None:
    of_heads, of_draft = hit_rates
    bench = make_headed(of_heads, takes_turns=takes_turns, is_steady=True, hit_rate=of_draft)
    bench.engine.known.target_ms = SIZE_BLIND
    turn = PROMPT
    for _ in range(4):
        expected = make_headed().decode(turn, "plain", max_new_tokens=24, **sampling)
        assert bench.decode(turn, "auto", max_new_tokens=24, **sampling) == expected
        turn = [*turn, *expected, 2, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_auto_uses_a_head_that_is_right_where_the_draft_is_not(
    make_bench: Callable[..., Any], draft_handler: Callable[..., Any], kind: str
) -> None:
    draft = FakeDraft(lambda _: useless(bench), vocab_size=16, num_streams=3)
    bench = make_bench(draft=draft, is_steady=True, takes_turns=True)
    bench.target.add_head(head_of(kind), draft_handler(1.0, 3))
    bench.engine.known.target_ms = SIZE_BLIND
    for number in range(4):
        bench.decode([number, *PROMPT], "auto", max_new_tokens=60)
    methods = [step.method for step in bench.last_request.steps]
    assert methods.count(kind) >= len(methods) - 2
    assert len(methods) <= 20, "a head that is always right brings five tokens a step"


def test_auto_pays_little_for_heads_that_are_never_right(make_headed: Callable[..., Any]) -> None:
    """Five of them, each a third of a pass: the first texts try them, later ones hardly do."""
    bench = make_headed(0.0, hit_rate=0.0, is_steady=True, takes_turns=True)
    bench.engine.known.target_ms = SIZE_BLIND
    slow_guesses(bench, 0.3)
    lost = []
    for number in range(14):
        prompt = [number, *PROMPT]
        tokens = bench.decode(prompt, "auto", max_new_tokens=100)
        decoding = sum(step.own_seconds for step in bench.last_request.steps)
        lost.append(decoding / len(tokens) - 1)
    assert max(lost) < 0.05
    assert sum(lost[-4:]) / 4 < 0.012


def test_a_head_that_fails_leaves_auto_with_the_rest(make_headed: Callable[..., Any]) -> None:
    bench = make_headed(1.0, is_steady=True, takes_turns=True)
    bench.engine.known.target_ms = SIZE_BLIND
    for number in range(3):
        bench.decode([number, *PROMPT], "auto", max_new_tokens=24)

    def broken(*arguments: Any, **options: Any) -> HeadGuesses:
        raise DeviceError("it is gone")

    bench.target.guess = broken
    expected = make_headed().decode([9, *PROMPT], "plain", max_new_tokens=24)
    with pytest.warns(RuntimeWarning, match="The head failed"):
        assert bench.decode([9, *PROMPT], "auto", max_new_tokens=24) == expected
