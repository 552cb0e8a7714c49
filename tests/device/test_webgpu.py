"""The target on a real GPU provider: ONNX Runtime's WebGPU, on a graphics card or on a Vulkan made of software.

`python scripts/check_webgpu.py` makes the environment that these tests need, and runs them.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirrorsd.device_maps import load_device_map
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("MIRRORSD_WEBGPU_PYTHON", "")
PASSES = (([5, 9, 100, 7, 45, 6, 7, 8, 9], 0), ([3, 4, 5, 6], 9), ([7, 8], 11), ([1], 13))
pytestmark = [
    pytest.mark.webgpu,
    pytest.mark.skipif(not PYTHON, reason="no environment with WebGPU: run scripts/check_webgpu.py"),
]


def ask(jobs: str, bundle: Path, **variables: str) -> dict[str, Any]:
    """What the program says of a bundle, by job."""
    program = [PYTHON, str(ROOT / "tests" / "device" / "webgpu_program.py"), jobs, str(bundle)]
    done = subprocess.run(program, timeout=560, capture_output=True, text=True, env={**os.environ, **variables})
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-4000:]}"
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def bundle_of(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Exports of the tiny pair by precision, each made once."""
    from mirrorsd.export import ExportOptions, export_pair

    made: dict[str, Path] = {}

    def make(precision: str) -> Path:
        if precision not in made:
            made[precision] = tmp_path_factory.mktemp("webgpu") / f"{precision}.mirror"
            options = ExportOptions(precision=precision, context=512, buckets=((8, 8), (64, 1)), capacities=(256,))
            export_pair(*tiny_pair, made[precision], options)
        return made[precision]

    return make


@pytest.fixture(scope="module")
def said_of(bundle_of: Callable[[str], Path]) -> Callable[[str, str], Any]:
    """What the program says of the bundle of a precision, asked once for all jobs that the tests have for it."""
    found: dict[tuple[str, str], Any] = {}

    def say(job: str, precision: str) -> Any:
        if (job, precision) not in found:
            together = "texts,passes,trees,memory,filtered" if precision == "fp32" else job
            answers = ask(together, bundle_of(precision))
            found.update({(name, precision): answer for name, answer in answers.items()})
        return found[job, precision]

    return say


@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("int8", marks=pytest.mark.long), pytest.param("int4", marks=pytest.mark.long)]
)
def test_every_method_and_two_sessions_at_once_write_the_plain_text(
    said_of: Callable[[str, str], Any], precision: str
) -> None:
    found = said_of("texts", precision)
    assert any("WebGpuExecutionProvider" in line for line in found["placement"])
    for way in ("greedy", "sampled"):
        assert len({tuple(found["texts"][f"{method} {way}"]) for method in ("plain", "serial", "mirror", "auto")}) == 1
    assert found["texts"]["plain greedy"] != found["texts"]["plain sampled"]
    assert found["together"] == found["alone"]


def test_filtered_texts_are_the_same_from_whole_rows_and_from_their_best_logits(
    said_of: Callable[[str, str], Any],
) -> None:
    found = said_of("filtered", "fp32")
    assert found["best"] == found["whole"]
    assert found["enough"] > 20
    assert found["not enough"] < found["enough"], "a tiny random model is flat"


@pytest.mark.parametrize(
    ("precision", "bound"), [("fp32", 1e-4), pytest.param("int8", 0.3, marks=pytest.mark.long), ("int4", 0.3)]
)
def test_prompts_windows_and_rolled_back_rows_are_the_processor_s(
    bundle_of: Callable[[str], Path], said_of: Callable[[str, str], Any], precision: str, bound: float
) -> None:
    """The processor rounds activations to eight bits under int8 and int4 weights, a GPU does not."""
    bundle = bundle_of(precision)
    found = said_of("passes", precision)
    target = OnnxTargetModel(bundle, read_bundle(bundle).target, load_device_map("cpu").target).new_session()
    for (tokens, start), logits in zip(PASSES, found["logits"], strict=True):
        expected = target.run(np.array(tokens), start, with_logits=True, ledger=Ledger()).logits
        assert expected is not None
        assert np.abs(np.array(logits) - expected).max() < bound * expected.std()
    assert set(found["nodes"]) == {"WebGpuExecutionProvider"}


def test_texts_with_siblings_are_those_without_and_rows_of_a_tree_those_of_its_chains(
    said_of: Callable[[str, str], Any],
) -> None:
    found, without = said_of("trees", "fp32"), said_of("texts", "fp32")["texts"]
    assert found["siblings"] > 0
    for way in ("greedy", "sampled"):
        for method in ("serial", "mirror", "auto"):
            assert found["texts"][f"{method} {way}"] == without[f"plain {way}"]
    together, alone = np.array(found["together"]), np.array(found["alone"])
    assert np.abs(together - alone).max() < 1e-4 * alone.std()


def test_requests_leave_no_memory_behind(said_of: Callable[[str, str], Any]) -> None:
    """A session's caches have a quarter of a megabyte: 30 of them would be seen."""
    assert said_of("memory", "fp32")["left"] < 6


@pytest.mark.long
def test_200_requests_leave_no_memory_behind(bundle_of: Callable[[str], Path]) -> None:
    assert ask("long_memory", bundle_of("fp32"))["long_memory"]["left"] < 20


@pytest.mark.skipif(
    not os.environ.get("SOFTWARE_VULKAN"), reason="only the driver of the software GPU loses it on demand"
)
def test_a_device_that_is_lost_in_the_middle_ends_the_text_and_those_after_it(
    bundle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The driver refuses all work from the fourth token on, with the number that says that the device is gone."""
    found = ask("lost", bundle_of("fp32"), LOSE_DEVICE=str(tmp_path / "lost"))["lost"]
    assert 4 <= len(found["tokens"]) < 24
    assert found["tokens"] == found["alone"][: len(found["tokens"])]
    assert [name for name, _ in found["errors"]] == ["DeviceError"] * 3
    assert all("the device was lost" in words for _, words in found["errors"])


@pytest.mark.long
def test_a_gpu_without_16_bit_arithmetic_says_so(bundle_of: Callable[[str], Path]) -> None:
    found = ask("refused", bundle_of("fp16"))["refused"]
    if found["error"] is None:
        pytest.skip("this GPU has 16-bit arithmetic")
    assert found["error"] == "DeviceError"
    assert "16-bit arithmetic" in found["words"]
    assert "--precision fp32" in found["words"]
