import pytest
import torch

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.run.device import autocast, use_device


def test_auto_takes_the_processor_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert use_device("auto").type == "cpu"
    with autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


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
