"""`export --device-map`: compiled where the card's devices are, said where they are not."""

import pytest

from mirrorsd.cli.commands.export import check_device_map, present_card
from mirrorsd.cli.input.options import ComputeName
from mirrorsd.graphs.errors import DeviceError


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
    check_device_map("cuda-cpu", "fp16")
    check_device_map("cpu", "int4")
    assert "device map cuda-cpu: the draft is compiled for it" in capsys.readouterr().err
    with pytest.raises(DeviceError, match="computes in bfloat16"):
        check_device_map("cpu", "bf16")
