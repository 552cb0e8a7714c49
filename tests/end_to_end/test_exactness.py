"""One bundle, three methods, one text: through export, ONNX Runtime and OpenVINO, on two cores."""

from pathlib import Path

import pytest

from mirrorsd import GenerationConfig, MirrorPipeline

METHODS = ("plain", "serial", "mirror")
PROMPTS = ("Once upon a time", "The old heron", "Every morning the fox went to the river and", "x")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}], ids=["greedy", "sampled"])
def test_all_methods_give_the_same_ids(tiny_bundle: Path, settings: dict[str, float]) -> None:
    config = GenerationConfig(max_new_tokens=48, ignore_eos=True).with_overrides(dict(settings))
    # The same number of rows in every pass: the arithmetic is the same to the last bit, so no near tie can flip.
    with MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation={"pad_rows_to": 8}) as pipe:
        for prompt in PROMPTS:
            texts = {method: pipe.generate(prompt, config, method=method) for method in METHODS}
            assert len({tuple(result.token_ids) for result in texts.values()}) == 1
            assert {result.method for result in texts.values()} == set(METHODS)
            assert all(result.num_tokens == 48 for result in texts.values())
