"""`export --device-map`: compiled where the card's devices are, said where they are not."""

import pytest

from mirrorsd.cli.export import present_card


def test_a_card_whose_devices_are_here() -> None:
    card = present_card("cpu")
    assert card is not None
    assert card.name == "cpu"


def test_a_card_whose_devices_are_elsewhere_is_only_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert present_card("cuda-npu") is None
    err = capsys.readouterr().err
    assert err.startswith("not compiled, since the device is not here (`mirrorsd compile` does it there)")
    assert "CUDAExecutionProvider" in err
