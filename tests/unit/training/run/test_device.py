from collections.abc import Iterator

import pytest
import torch

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.run import device
from mirrorsd.training.run.device import autocast, narrowed, use_device


@pytest.fixture(autouse=True)
def _forget_the_processor() -> Iterator[None]:
    device.multiplies_bfloat16.cache_clear()
    yield
    device.multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [({"amx_bf16": True}, torch.bfloat16), ({"avx512_bf16": False, "avx2": True}, torch.float32)],
)
def test_a_processor_multiplies_in_bfloat16_where_it_can(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert use_device("auto").type == "cpu"
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    with narrowed([weight]):
        assert weight.dtype == dtype
    assert weight.dtype == torch.float32


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="this PyTorch finds no CUDA device"):
        use_device("cuda")
    with pytest.raises(ConfigError, match="device is 'gpu'; allowed: auto, cuda, cpu"):
        use_device("gpu")


def test_everything_new_lies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_to: list[torch.device] = []
    monkeypatch.setattr(torch, "set_default_device", set_to.append)
    assert use_device("auto").type == "cuda"
    assert [device.type for device in set_to] == ["cuda"]
