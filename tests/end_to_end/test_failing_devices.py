"""Devices that are missing, files that do not fit, an NPU that dies: clear words, and the text is never wrong."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.devices.openvino import draft_pass
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.user_cache import folder_of

SETTINGS = {"max_new_tokens": 40, "ignore_eos": True}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def copied(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny bundle under a name of its own, whose compiled drafts nobody else touches."""
    folder = tmp_path_factory.mktemp("failing") / "failing.mirror"
    shutil.copytree(tiny_bundle, folder)
    return folder


def open_pipe(bundle: Path, card: str = "npu-emulated") -> MirrorPipeline:
    return MirrorPipeline.load(bundle, device_map=card, speculation={"pad_rows_to": 8})


def test_an_npu_that_dies_in_the_middle(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pipe(copied) as pipe:
        plain = pipe.generate(PROMPT, method="plain", **SETTINGS)
        left = iter(range(6))
        alive = draft_pass.run_request

        def die(request: object, limit_s: float) -> None:
            if next(left, None) is None:
                raise DeviceError("OpenVINO failed while running the draft: device lost")
            alive(request, limit_s)  # type: ignore[arg-type]

        monkeypatch.setattr(draft_pass, "run_request", die)
        with pytest.warns(RuntimeWarning, match="device lost"):
            result = pipe.generate(PROMPT, method="mirror", **SETTINGS)
        assert result.token_ids == plain.token_ids
        assert "device lost" in result.stats.warnings[0]
        assert next(left, None) is None
        monkeypatch.undo()
        again = pipe.generate(PROMPT, method="mirror", **SETTINGS)
        assert again.token_ids == plain.token_ids
        assert again.stats.warnings == []


@pytest.mark.parametrize("harm", ["damaged", "another version"])
def test_compiled_files_that_do_not_fit(copied: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    with open_pipe(copied, "cpu") as pipe:
        expected = pipe.generate(PROMPT, method="mirror", **SETTINGS).token_ids
    cache = folder_of(copied) / "compiled"
    for record in cache.glob("cpu-*.json"):
        if harm == "damaged":
            record.with_suffix(".blob").write_bytes(b"not what was written")
        else:
            document = json.loads(record.read_text(encoding="utf-8"))
            document["made_by"]["OpenVINO"] = "2020.1"
            record.write_text(json.dumps(document), encoding="utf-8")
    caplog.set_level(logging.WARNING)
    with open_pipe(copied, "cpu") as pipe:
        assert pipe.generate(PROMPT, method="mirror", **SETTINGS).token_ids == expected
    words = "is damaged" if harm == "damaged" else "it was made with OpenVINO 2020.1"
    assert words in caplog.text
    assert "compiling again" in caplog.text


def test_a_card_whose_device_is_missing_loads_nothing(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="Device map 'directml-npu' does not fit this machine"):
        open_pipe(copied, "directml-npu")
    strict = tmp_path / "strict.toml"
    strict.write_text(
        'fallbacks = ["directml-npu"]\n[target]\nprovider = "NvTensorRTRTXExecutionProvider"\n', encoding="utf-8"
    )
    with pytest.raises(
        DeviceError, match=r"strict: .*NvTensorRTRTXExecutionProvider.*directml-npu: .*DmlExecutionProvider"
    ):
        open_pipe(copied, str(strict))
