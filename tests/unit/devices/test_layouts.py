"""Layouts of the processor's cores: which is in force, what it makes of a card, which one `tune` takes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.device_maps import DeviceMap, DraftPlacement, TargetPlacement, load_device_map
from mirrorsd.devices.layouts import Cores, choose_layout, lay_out, thread_cores, usable_cores
from mirrorsd.devices.onnxruntime.providers import session_options
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.machine.tuning.contest import Contest, best_speculation, fastest_layout, finalists
from mirrorsd.runtime.tuned import Tuned
from mirrorsd.texts.config import SpeculationConfig

FOUR = Cores((0, 1, 2, 3), 4)


def tuned(layout: str) -> Tuned:
    speeds = {"mirror": 1.0, "serial": 1.0, "plain": 1.0}
    values = {"predicted_step_ms": 1.0, "measured_step_ms": 1.0, "tokens_per_second": speeds, "speculation": {}}
    return Tuned(card="cpu", fingerprint="", layout=layout, **values)  # type: ignore[arg-type]


def contest(layout: str, method: str, speed: float, **speculation: Any) -> Contest:
    steps = {"tokens_per_step": 1.0, "step_ms": 1.0, "predicted_step_ms": 1.0}
    figures = {**steps, "tokens_per_second": speed, "mean_accepted": 0.0, "reuse_rate": 0.0}
    return Contest(layout=layout, method=method, speculation=SpeculationConfig(**speculation), **figures)


def test_the_first_layout_until_tuned_then_the_fastest_unless_asked() -> None:
    card = load_device_map("cpu")
    assert choose_layout(card).name == "shared"
    assert choose_layout(card, None, "apart").name == "apart"
    assert choose_layout(card, "shared", "apart").name == "shared"
    assert "mirrorsd tune" in choose_layout(card).reason
    named = choose_layout(card, "shared").reason
    assert named == "layout: shared (as named)", "tune names each of them in turn, and nobody has asked for it"


def test_a_card_with_one_layout_has_only_that() -> None:
    own = DeviceMap(name="mine", target=TargetPlacement(cores=(2,)), draft=DraftPlacement(cores=(3,)))
    chosen = choose_layout(own, None, "shared")
    assert (chosen.name, chosen.device_map) == ("apart", own)
    with pytest.raises(ConfigError, match="layout is 'shared'; device map 'mine' permits apart"):
        choose_layout(own, "shared")


def test_shared_gives_both_sides_every_core_and_leaves_the_rest() -> None:
    card = load_device_map("cpu")
    shared = lay_out(card, "shared", FOUR)
    assert (shared.target.cores, shared.target.threads) == ((0, 1, 2, 3), 4)
    assert (shared.draft.cores, shared.draft.threads) == ((0, 1, 2, 3), 4)
    assert (shared.draft.precision, shared.draft.activation_group) == (card.draft.precision, 128)
    apart = lay_out(card, "apart", FOUR)
    assert (apart.target.cores, apart.draft.cores) == ((0,), (1,)), "physical cores, whatever their numbers"


def test_shared_keeps_to_the_cores_that_a_card_names() -> None:
    card = DeviceMap(name="mine", layouts=("shared",), shared_cores=(1, 3))
    assert lay_out(card, "shared", FOUR).target.cores == (1, 3)


def test_where_nothing_can_be_pinned_there_is_a_thread_per_processor() -> None:
    shared = lay_out(DeviceMap(name="mine", layouts=("shared",)), "shared", Cores((), 6))
    assert (shared.target.cores, shared.target.threads) == ((), 6)


def test_the_calling_thread_and_the_pool_share_no_core() -> None:
    target = lay_out(load_device_map("cpu"), "shared", FOUR).target
    assert thread_cores(target, in_onnxruntime=True) == (0,)
    entry = "session.intra_op_thread_affinities"
    assert session_options(target).get_session_config_entry(entry) == "2;3;4", "ONNX Runtime counts from 1"
    assert session_options(target).get_session_config_entry("session.force_spinning_stop") == "1"
    assert not session_options(target).enable_cpu_mem_arena, "it would keep the head's weights twice"
    pool_of_its_own = TargetPlacement(runtime="openvino", cores=(0, 1), threads=2)
    assert thread_cores(pool_of_its_own, in_onnxruntime=False) == (0, 1), (
        "OpenVINO's threads inherit the cores of their maker"
    )


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux says which processors are usable")
def test_one_number_per_physical_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    for number, siblings in {0: "0,4", 4: "0,4", 1: "1,5"}.items():
        (tmp_path / f"cpu{number}").write_text(siblings + "\n", encoding="ascii")
    assert usable_cores(str(tmp_path / "cpu{}")) == Cores((0, 1, 5), 3), "5 says nothing: a core of its own"


def test_the_layout_with_the_highest_speeds_wins() -> None:
    apart = [contest("apart", "mirror", 30.0), contest("apart", "plain", 10.0)]
    shared = [contest("shared", "serial", 20.0), contest("shared", "plain", 12.0)]
    assert fastest_layout([*apart, *shared]) == "apart"
    slow_when_sampled = [contest("apart", "serial", 12.0), contest("apart", "plain", 10.0)]
    assert fastest_layout([*apart, *shared], [*slow_when_sampled, *shared]) == "shared"


def test_among_equals_the_fastest_plain_decoding_decides() -> None:
    speeds = {
        ("apart", "mirror"): 30.0,
        ("apart", "plain"): 10.0,
        ("shared", "serial"): 29.5,
        ("shared", "plain"): 14.0,
    }
    assert fastest_layout([contest(*place, speed) for place, speed in speeds.items()]) == "shared"


def test_among_equals_the_least_bound_speculation_is_kept() -> None:
    fastest = contest("shared", "serial", 100.0, gamma=12, passes=2, window="worthwhile")
    free = contest("shared", "serial", 97.5, gamma=12, passes=4, window="worthwhile")
    uncut = contest("shared", "serial", 99.0, gamma=12, passes=4, window="full")
    slow = contest("shared", "serial", 96.0, gamma=12, passes=5, window="worthwhile")
    mirror = contest("shared", "mirror", 99.0, gamma=12, passes=6, window="worthwhile")
    plain = contest("shared", "plain", 120.0, passes=7)
    assert best_speculation([plain, fastest, uncut, mirror, free, slow]) is free
    assert best_speculation([plain, fastest, uncut, mirror, slow]) is fastest


def test_every_method_gets_to_the_finals() -> None:
    settings = [SpeculationConfig(gamma=gamma) for gamma in (2, 3, 4)]
    ranked = [("serial", setting) for setting in settings] + [("mirror", setting) for setting in settings]
    assert finalists(ranked, 2) == [ranked[0], ranked[1], ranked[3]]
    assert finalists(ranked, 4) == ranked[:4]


def test_mirror_decoding_gets_to_the_finals_with_exits_and_without() -> None:
    early, hearing = SpeculationConfig(), SpeculationConfig(root_source="progressive")
    alone = replace(hearing, exits=())
    listening = [replace(hearing, gamma=gamma) for gamma in (2, 3, 4)]
    ranked = [("mirror", setting) for setting in (*listening, early, alone)]
    assert finalists(ranked, 2) == [*ranked[:2], ranked[3]]
    assert finalists([("serial", early), *reversed(ranked)], 1) == [("serial", early), ranked[4], ranked[2]]
