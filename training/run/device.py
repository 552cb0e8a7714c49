"""Where a training computes: a CUDA device or the processor.

Owns: the choice, and making it what PyTorch's new tensors lie on. Does not own: moving models (their callers do).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mirrorsd.families.narrow_products import multiplies_bfloat16
from mirrorsd.graphs.errors import ConfigError

__all__ = ["DEVICES", "autocast", "matrices", "narrowed", "product_dtype", "to_device", "use_device"]

DEVICES = ("auto", "cuda", "cpu")


def use_device(asked: str) -> torch.device:
    """Compute there from now on: every tensor that is made without a word about its place is made there.

    Args:
        asked: "auto" takes CUDA where there is some.

    Raises:
        ConfigError: another word, or CUDA where there is none.
    """
    if asked not in DEVICES:
        raise ConfigError(f"RunConfig.device is {asked!r}; allowed: {', '.join(DEVICES)}")
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise ConfigError(
            "RunConfig.device is 'cuda', but this PyTorch finds no CUDA device: install a build of PyTorch with CUDA, "
            "or ask for 'cpu'"
        )
    device = torch.device("cpu" if asked == "cpu" or not has_cuda else "cuda")
    if device.type == "cpu":
        _keep_freed_memory()
    if torch.get_default_device() != device:
        torch.set_default_device(device)
    return device


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of malloc.h
_PAD_BYTES = 256 << 20


def _keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one: new pages cost more than the products (3.6 s -> 0.7 s)."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, _PAD_BYTES)):
            mallopt(option, value)


def to_device(model: Any) -> Any:
    """Move a model to where the training computes."""
    return model.to(torch.get_default_device())


def matrices(model: nn.Module) -> list[Tensor]:
    """What a model's layers multiply with; embedding, norms and the residual between the layers are none of it."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


@contextmanager
def narrowed(weights: Iterable[Tensor]) -> Iterator[None]:
    """Have weights in the type that products are made in, so that no step casts them; undone at the end."""
    dtype = product_dtype()
    whole = [(weight, weight.data) for weight in weights]
    for weight, data in whole:
        weight.data = data.to(dtype)
    try:
        yield
    finally:
        for weight, data in whole:
            weight.data = data


def product_dtype() -> torch.dtype:
    """What the training multiplies in: bfloat16, but single precision on processors that have no products in it."""
    is_narrow = torch.get_default_device().type != "cpu" or multiplies_bfloat16()
    return torch.bfloat16 if is_narrow else torch.float32


def autocast() -> torch.autocast:
    """Products in `product_dtype` wherever the training computes."""
    return torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=product_dtype() == torch.bfloat16)
