"""Settings are checked where they are made: field, value and allowed range in one sentence."""

from copy import deepcopy

import numpy as np
import pytest

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.machine.tuning.contest import candidate_settings
from mirrorsd.texts.config import CancelToken, GenerationConfig, SpeculationConfig, resolve_generation
from mirrorsd.texts.speculation import resolve_speculation


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens is 0; allowed: 1 or more"),
        ({"temperature": -1.0}, r"temperature is -1.0; allowed: 0 \(greedy\), or 0.001 to 100 \(a number\), or None"),
        ({"temperature": 1e-310}, r"temperature is 1e-310; allowed"),
        ({"temperature": 10**400}, r"temperature is 1000"),
        ({"repetition_penalty": 10**5000}, r"repetition_penalty is a int of too many digits; allowed"),
        ({"top_p": 10**5000}, r"top_p is a int of too many digits; allowed"),
        ({"seed": 10**5000}, r"seed is a int of too many digits; allowed"),
        ({"logit_bias": {5: 10**400}}, r"logit_bias is \{5: 1000"),
        ({"temperature": "1"}, r"GenerationConfig.temperature is '1'; allowed"),
        ({"temperature": float("nan")}, r"temperature is nan"),
        ({"temperature": True}, r"temperature is True"),
        ({"max_new_tokens": "10"}, r"GenerationConfig.max_new_tokens is '10'; allowed: 1 or more \(a whole number\)"),
        ({"max_new_tokens": 10.5}, r"max_new_tokens is 10.5"),
        ({"max_new_tokens": True}, r"max_new_tokens is True"),
        ({"max_new_tokens": None}, r"max_new_tokens is None"),
        ({"top_k": 1.5}, r"top_k is 1.5"),
        ({"top_p": float("nan")}, r"top_p is nan"),
        ({"repetition_penalty": float("inf")}, r"repetition_penalty is inf"),
        ({"seed": 1.5}, r"seed is 1.5; allowed: 0 to 2\*\*64 - 1 \(a whole number\), or None"),
        ({"seed": 2**64}, r"seed is 18446744073709551616"),
        ({"ignore_eos": 1}, r"ignore_eos is 1; allowed: True or False"),
        ({"do_sample": "yes"}, r"do_sample is 'yes'; allowed: True or False, or None"),
        ({"stop_token_ids": 5.0}, r"stop_token_ids is 5.0; allowed: an id, or several"),
        ({"stop_token_ids": [1, "2"]}, r"stop_token_ids is \[1, '2'\]"),
        ({"stop_strings": 5}, r"stop_strings is 5; allowed: a string that is not empty, or several"),
        ({"stop_strings": ["a", 5]}, r"stop_strings is \['a', 5\]"),
        ({"stop_strings": ""}, r"stop_strings is ''"),
        ({"method": ["mirror"]}, r"method is \['mirror'\]; allowed: plain, serial, mirror"),
        ({"top_p": 0.0}, r"top_p is 0.0"),
        ({"min_p": 1.0}, r"min_p is 1.0"),
        ({"top_k": -2}, r"top_k is -2"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0.0"),
        ({"seed": -1}, r"seed is -1"),
        ({"method": "fast"}, r"method is 'fast'; allowed: plain, serial, mirror, auto"),
        ({"stop_strings": ("",)}, r"stop_strings"),
        ({"do_sample": True, "temperature": 0.0}, r"above 0 when do_sample=True"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2.5; allowed: -2 to 2 \(a number\)"),
        ({"frequency_penalty": None}, r"frequency_penalty is None"),
        ({"logit_bias": {5: 101}}, r"logit_bias is \{5: 101\}; allowed: token ids and numbers from -100 to 100"),
        ({"logit_bias": {"a": 1}}, r"logit_bias is"),
        ({"logit_bias": {-1: 1}}, r"logit_bias is"),
        ({"logit_bias": {5: True}}, r"logit_bias is"),
        ({"logit_bias": {5: float("nan")}}, r"logit_bias is"),
        ({"logit_bias": [5]}, r"logit_bias is"),
        ({"logprobs": 1}, r"logprobs is 1; allowed: True or False"),
        ({"logprobs": True, "top_logprobs": 21}, r"top_logprobs is 21; allowed: 0 to 20"),
        ({"top_logprobs": 2}, r"top_logprobs is 2; allowed: 0, or logprobs=True beside it"),
        ({"skip_special_tokens": None}, r"skip_special_tokens is None"),
        ({"json_schema": "{"}, r"json_schema is '\{'; allowed: a JSON schema"),
        ({"json_schema": [1]}, r"json_schema is \[1\]"),
        ({"json_schema": {"default": float("nan")}}, r"json_schema is"),
        ({"json_schema": {"x": object()}}, r"json_schema is"),
        ({"json_schema": "[" * 100_000}, r"json_schema is"),
        ({"regex": ""}, r"regex is ''; allowed: a string that is not empty, or None"),
        ({"grammar": 5}, r"grammar is 5"),
        ({"regex": "a", "grammar": "start: A"}, r"grammar is 'start: A'; allowed: None beside regex"),
        ({"regex": "a", "ignore_eos": True}, r"ignore_eos is True; allowed: False beside regex"),
        ({"tools": {"a": 1}}, r"tools is \{'a': 1\}; allowed: a list of mappings"),
        ({"tools": [5]}, r"tools is \[5\]"),
        ({"template_variables": {5: 1}}, r"template_variables is \{5: 1\}; allowed: a mapping of names"),
        ({"deadline_s": 0}, r"deadline_s is 0; allowed: above 0, up to 86400 seconds"),
        ({"cancel": True}, r"cancel is True; allowed: a CancelToken, or None"),
    ],
)
def test_generation_config_refuses(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationConfig(**settings)


def test_overrides_name_the_unknown_field() -> None:
    with pytest.raises(ConfigError, match=r"no field 'max_tokens'; it has max_new_tokens"):
        GenerationConfig().with_overrides({"max_tokens": 3})
    assert GenerationConfig().with_overrides({"stop_strings": ["a"]}).stop_strings == ("a",)
    with pytest.raises(ConfigError, match="config is of type dict; allowed: a GenerationConfig"):
        resolve_generation({"top_k": 3}, {}, {})  # type: ignore[arg-type]


def test_a_plain_string_is_one_stop_string_and_an_id_one_stop_id() -> None:
    config = GenerationConfig(stop_strings="END", stop_token_ids=7)  # type: ignore[arg-type]
    assert (config.stop_strings, config.stop_token_ids) == (("END",), (7,))
    assert GenerationConfig().with_overrides({"stop_strings": "king"}).stop_strings == ("king",)
    assert GenerationConfig(stop_strings=None).stop_strings == ()  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    config = GenerationConfig(
        max_new_tokens=np.int64(7), temperature=np.float32(0.5), seed=np.uint64(9), stop_token_ids=np.arange(2)
    )
    assert (config.max_new_tokens, config.temperature, config.seed, config.stop_token_ids) == (7, 0.5, 9, (0, 1))
    assert {type(config.max_new_tokens), type(config.seed), *map(type, config.stop_token_ids)} == {int}


QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def chosen(config: GenerationConfig) -> tuple:
    return (config.is_sampling, config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty)


@pytest.mark.parametrize(
    ("settings", "defaults", "expected"),
    [
        ({}, {}, (False, 0.0, 0, 1.0, 0.0, 1.0)),
        ({}, QWEN, (True, 0.6, 20, 0.95, 0.0, 1.0)),
        ({"temperature": 1.0, "top_k": 0}, QWEN, (True, 1.0, 0, 0.95, 0.0, 1.0)),
        ({"top_p": 0.5, "seed": 3}, QWEN, (True, 0.6, 20, 0.5, 0.0, 1.0)),
        ({"temperature": 0}, QWEN, (False, 0.0, 0, 1.0, 0.0, 1.0)),
        ({"do_sample": False, "seed": 3}, QWEN, (False, 0.0, 0, 1.0, 0.0, 1.0)),
        ({"use_defaults": False}, QWEN, (False, 0.0, 0, 1.0, 0.0, 1.0)),
        ({"use_defaults": False, "temperature": 0.9}, QWEN, (True, 0.9, 0, 1.0, 0.0, 1.0)),
        ({}, {"temperature": 0.7, "top_k": 20}, (False, 0.0, 0, 1.0, 0.0, 1.0)),
        ({"do_sample": True}, {"temperature": 0.7, "top_k": None}, (True, 0.7, 0, 1.0, 0.0, 1.0)),
        ({}, {"repetition_penalty": 1.1}, (False, 0.0, 0, 1.0, 0.0, 1.1)),
        ({"temperature": 0.0, "top_p": 0.5, "seed": 1}, {}, (False, 0.0, 0, 1.0, 0.0, 1.0)),
        ({"top_p": 1.0, "top_k": 0}, {}, (False, 0.0, 0, 1.0, 0.0, 1.0)),
    ],
)
def test_what_is_left_open_is_the_checkpoint_s_choice_then_nothing(
    settings: dict, defaults: dict, expected: tuple
) -> None:
    resolved = GenerationConfig(**settings).resolve(defaults)
    assert chosen(resolved) == expected
    assert resolved.resolve(QWEN) == resolved, "resolved is resolved"
    assert (resolved.seed is not None) == resolved.is_sampling


@pytest.mark.parametrize("option", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"seed": 3}])
def test_a_sampling_option_for_a_text_that_is_not_sampled_is_refused(option: dict) -> None:
    name = next(iter(option))
    with pytest.raises(
        ConfigError, match=rf"GenerationConfig.{name} is .*this text is not sampled: give a temperature"
    ):
        GenerationConfig(**option).resolve({})


def test_a_seed_is_drawn_where_none_is_given() -> None:
    config = GenerationConfig(temperature=1.0)
    assert len({config.resolve().seed for _ in range(20)}) > 15
    assert config.with_overrides({"seed": 0}).resolve().seed == 0


def test_a_default_of_the_checkpoint_that_is_not_allowed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint's own default .*top_p is 7; .*use_defaults=False"):
        GenerationConfig().resolve({"do_sample": True, "top_p": 7})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": "6"}, r"SpeculationConfig.gamma is '6'; allowed: 1 to 31 \(a whole number\)"),
        ({"roots": 2.0}, r"roots is 2.0"),
        ({"draft_deadline_s": "10"}, r"draft_deadline_s is '10'"),
        ({"draft_deadline_s": float("nan")}, r"draft_deadline_s is nan"),
        ({"window": 3}, r"window is 3; allowed: "),
        ({"exits": "12"}, r"exits is '12'; allowed: \"all\", a layer, or several"),
        ({"exits": None}, r"exits is None"),
        ({"exits": [1.5]}, r"exits is \[1.5\]"),
    ],
)
def test_speculation_refuses(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig(**settings)
    found = SpeculationConfig(gamma=np.int32(4), root_source="proxy", exits=3)  # type: ignore[arg-type]
    assert found.exits == (3,)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, False), ({"temperature": 0.5}, True), ({"temperature": 0.0}, False), ({"do_sample": True}, True)],
)
def test_sampling_is_on_when_asked_for(settings: dict, expected: bool) -> None:
    assert GenerationConfig(**settings).is_sampling is expected


def test_speculation_overrides() -> None:
    assert resolve_speculation(SpeculationConfig(), {"gamma": 3}).gamma == 3
    tuned = {"root_source": "progressive", "exits": [2, 4]}
    assert resolve_speculation(SpeculationConfig(), tuned).exits == (2, 4), "as a tuned file has it"
    with pytest.raises(ConfigError, match="no speculation setting 'gama'"):
        resolve_speculation(SpeculationConfig(), {"gama": 3})
    with pytest.raises(ConfigError, match="gamma is 99; allowed: 1 to 31"):
        SpeculationConfig(gamma=99)
    with pytest.raises(ConfigError, match="pad_rows_to is 4; allowed: 0, or more than gamma"):
        SpeculationConfig(gamma=6, pad_rows_to=4)


def test_proxy_roots_need_an_exit() -> None:
    with pytest.raises(ConfigError, match=r"exits is \(\); allowed: at least one layer"):
        SpeculationConfig(root_source="proxy", exits=())


def test_exits_that_nobody_asks_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'exits is \(12,\); allowed: left out, "all" or none, as root_source "early"'
    ):
        SpeculationConfig(exits=12)  # type: ignore[arg-type]
    assert SpeculationConfig(root_source="early", exits=()).exits == ()


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


def test_biases_and_schemas_have_one_form() -> None:
    config = GenerationConfig(logit_bias={"7": 1, np.int64(3): np.float32(0.5)}, json_schema={"type": "object"})
    assert config.logit_bias == ((3, 0.5), (7, 1.0))
    assert config.biases == {3: 0.5, 7: 1.0}
    assert config.json_schema == '{"type": "object"}'
    assert GenerationConfig(json_schema=True).json_schema == "true"
    assert config.resolve({}) == config.resolve({}).resolve({})


def test_copied_settings_keep_their_token() -> None:
    token = CancelToken()
    config = deepcopy(GenerationConfig(cancel=token))
    token.cancel()
    assert config.cancel is not None
    assert config.cancel.is_cancelled
