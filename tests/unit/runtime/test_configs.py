"""Settings are checked where they are made: field, value and allowed range in one sentence."""

import pytest

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.engine import resolve_speculation
from mirrorsd.runtime.generation_config import GenerationConfig, SpeculationConfig
from mirrorsd.runtime.tuning import candidate_settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens is 0; allowed: 1 or more"),
        ({"temperature": -1.0}, r"temperature is -1.0; allowed: 0 to 100"),
        ({"top_p": 0.0}, r"top_p is 0.0"),
        ({"min_p": 1.0}, r"min_p is 1.0"),
        ({"top_k": -2}, r"top_k is -2"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0.0"),
        ({"seed": -1}, r"seed is -1"),
        ({"method": "fast"}, r"method is 'fast'; allowed: mirror, serial, plain, auto"),
        ({"stop_strings": ("",)}, r"stop_strings"),
        ({"do_sample": True, "temperature": 0.0}, r"above 0 when do_sample=True"),
    ],
)
def test_generation_config_refuses(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationConfig(**settings)


def test_overrides_name_the_unknown_field() -> None:
    with pytest.raises(ConfigError, match=r"no field 'max_tokens'; it has max_new_tokens"):
        GenerationConfig().with_overrides({"max_tokens": 3})
    assert GenerationConfig().with_overrides({"stop_strings": ["a"]}).stop_strings == ("a",)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, False), ({"temperature": 0.5}, True), ({"temperature": 0.0}, False), ({"do_sample": True}, True)],
)
def test_sampling_is_on_when_asked_for(settings: dict, expected: bool) -> None:
    assert GenerationConfig(**settings).is_sampling is expected


def test_speculation_overrides() -> None:
    assert resolve_speculation(SpeculationConfig(), {"gamma": 3}).gamma == 3
    assert resolve_speculation(SpeculationConfig(), {"exits": [2, 4]}).exits == (2, 4), "as a tuned file has it"
    with pytest.raises(ConfigError, match="no speculation setting 'gama'"):
        resolve_speculation(SpeculationConfig(), {"gama": 3})
    with pytest.raises(ConfigError, match="gamma is 99; allowed: 1 to 31"):
        SpeculationConfig(gamma=99)
    with pytest.raises(ConfigError, match="pad_rows_to is 4; allowed: 0, or more than gamma"):
        SpeculationConfig(gamma=6, pad_rows_to=4)


def test_proxy_roots_need_an_exit() -> None:
    with pytest.raises(ConfigError, match=r"exits is \(\); allowed: at least one layer"):
        SpeculationConfig(root_source="proxy", exits=())


def test_the_tuner_tries_no_second_pass_for_windows_that_one_pass_fills() -> None:
    tried = {(setting.gamma, setting.passes) for setting in candidate_settings(SpeculationConfig(), 3)}
    assert {passes for gamma, passes in tried if gamma <= 4} == {1}
    assert {passes for gamma, passes in tried if gamma == 12} == {2, 4}
    assert {setting.passes for setting in candidate_settings(SpeculationConfig(passes=1), 0)} == {1}


def test_the_tuner_tries_as_many_roots_without_the_exit_as_with_it() -> None:
    tried = {(setting.root_source, setting.roots) for setting in candidate_settings(SpeculationConfig(), 3)}
    assert {("early", 8), ("early", 24), ("progressive", 8), ("progressive", 24)} <= tried


def test_the_tuner_tries_each_exit_alone_and_none_where_there_are_several() -> None:
    base = SpeculationConfig()
    tried = candidate_settings(base, 3, [12, 20])
    assert [setting.exits for setting in tried if setting.exits != "all"] == [(), (12,), (20,)]
    assert {setting.exits for setting in candidate_settings(base, 3, [12])} == {"all"}
