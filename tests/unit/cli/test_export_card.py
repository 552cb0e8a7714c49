"""`export --device-map`: compiled where the card's devices are, said where they are not."""

import pytest

from mirrorsd.cli.commands.export import (
    card_of_this_machine,
    check_device_map,
    draft_weights_for,
    note_faster_draft,
    present_card,
)
from mirrorsd.cli.input.options import ComputeName, DraftPrecision
from mirrorsd.device_maps import builtin_names, load_device_map
from mirrorsd.devices import inventory
from mirrorsd.graphs.errors import ConfigError, DeviceError


def test_a_card_whose_devices_are_here() -> None:
    card = present_card("cpu")
    assert card is not None
    assert card.name == "cpu"


def test_a_card_whose_devices_are_elsewhere_is_only_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert present_card("cuda-npu") is None
    err = capsys.readouterr().err
    assert err.startswith("not compiled, since the device is not here (`mirrorsd compile` does it there)")
    assert "CUDAExecutionProvider" in err


@pytest.mark.parametrize(("precision", "compute"), [("fp32", "auto"), ("int8", "fp32"), ("int4", "fp32")])
def test_a_card_that_cannot_run_the_bundle_is_refused_before_any_work(precision: str, compute: ComputeName) -> None:
    with pytest.raises(DeviceError, match=r"export it with --precision fp16 or bf16, or int8 or int4 with --compute"):
        check_device_map("cuda-cpu", precision, compute)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_integer_weights_compute_in_what_the_card_s_device_knows(
    precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_device_map("cuda-cpu", precision) == "fp16"
    assert "device map cuda-cpu: the target computes in fp16" in capsys.readouterr().err
    assert check_device_map("cuda-cpu", precision, "bf16") == "bf16"
    assert check_device_map("webgpu-cpu", precision) == "auto"
    with pytest.raises(DeviceError, match="computes in bfloat16"):
        check_device_map("cpu", precision, "bf16")


def test_a_card_that_can_is_said_to_be_what_the_draft_is_compiled_for(capsys: pytest.CaptureFixture[str]) -> None:
    check_device_map("cuda-npu", "fp16")
    check_device_map("cpu", "int4")
    assert draft_weights_for("cuda-npu", "auto") == "fp32"
    assert "device map cuda-npu: the draft is compiled for it" in capsys.readouterr().err
    with pytest.raises(DeviceError, match="computes in bfloat16"):
        check_device_map("cpu", "bf16")


@pytest.mark.parametrize("name", [None, *builtin_names()])
def test_a_draft_has_integers_by_row_where_the_card_has_it_on_a_processor(
    name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a card a bundle is for any device; where weights are named, these are taken."""
    is_on_processor = name is not None and load_device_map(name).draft.device == "CPU"
    assert draft_weights_for(name, "auto") == ("int8-rows" if is_on_processor else "fp32")
    assert ("in int8-rows, for processors alone" in capsys.readouterr().err) == is_on_processor
    assert draft_weights_for(name, "int8") == "int8"


@pytest.mark.parametrize("asked", ["int8-rows", "int4-blocks"])
def test_a_form_for_processors_is_refused_for_another_device(asked: DraftPrecision) -> None:
    with pytest.raises(ConfigError, match=f"--device-map cuda-npu has the draft on NPU, and one in {asked}"):
        draft_weights_for("cuda-npu", asked)
    assert draft_weights_for("cpu", asked) == asked == draft_weights_for(None, asked)


def test_auto_is_the_card_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert card_of_this_machine() == inventory.choose_device_map("auto").device_map.name
    assert "what fits this machine" in capsys.readouterr().err


@pytest.mark.parametrize(("card", "is_told"), [("cpu", True), ("cuda-cpu", True), ("igpu-npu", False), (None, False)])
def test_who_exports_for_any_device_is_told_what_is_faster_here(
    card: str | None, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(name: str) -> inventory.DeviceChoice:
        if card is None:
            raise DeviceError("ONNX Runtime is not installed")
        return inventory.DeviceChoice(load_device_map(card), [])

    monkeypatch.setattr(inventory, "choose_device_map", choose)
    note_faster_draft()
    assert ("with --device-map auto the draft gets" in capsys.readouterr().err) == is_told
