"""One bundle, all methods, one text: through export, ONNX Runtime and OpenVINO, on two cores."""

import json
from pathlib import Path

import pytest

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.cli.application import run

METHODS = ("plain", "serial", "mirror", "auto")
PROMPTS = ("Once upon a time", "The old heron", "Every morning the fox went to the river and", "x")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}], ids=["greedy", "sampled"])
def test_all_methods_give_the_same_ids(tiny_bundle: Path, settings: dict[str, float]) -> None:
    config = GenerationConfig(max_new_tokens=48, ignore_eos=True).with_overrides(dict(settings))
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        for prompt in PROMPTS:
            texts = {method: pipe.generate(prompt, config, method=method) for method in METHODS}
            assert len({tuple(result.token_ids) for result in texts.values()}) == 1
            assert {result.method for result in texts.values()} == set(METHODS)
            assert all(result.num_tokens == 48 for result in texts.values())


def test_statistics_count_the_tokens_that_were_returned(tiny_bundle: Path) -> None:
    config = GenerationConfig(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        whole = pipe.generate(PROMPTS[0], config, method="plain").token_ids
        for end in dict.fromkeys(whole[2:12]):
            for method in METHODS:
                result = pipe.generate(PROMPTS[0], config, method=method, stop_token_ids=(end,))
                assert result.token_ids == whole[: whole.index(end) + 1]
                assert round(result.stats.tokens_per_step * result.stats.steps) == result.num_tokens
                assert 0 < result.stats.prefill_ms < result.stats.time_to_first_token_ms <= 1e3 * result.stats.seconds


def test_compare_on_real_sessions(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", str(tiny_bundle), "--device-map", "cpu", "--max-new-tokens", "24"]
    assert run([*command, "--ignore-eos", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is True
    assert [row["method"] for row in report["rows"]] == list(METHODS)


def test_doctor_tries_a_bundle_on_every_real_card_that_fits(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", str(tiny_bundle), "--json"]) == 0
    tests = json.loads(capsys.readouterr().out)["self_tests"]
    assert {"cpu", "npu-emulated"} <= {test["device_map"] for test in tests}
    assert all(test["identical"] and not test["failure"] for test in tests)
    assert {test["row_difference"] for test in tests if test["device_map"] in ("cpu", "npu-emulated")} == {0.0}
