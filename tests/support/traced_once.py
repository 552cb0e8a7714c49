"""PyTorch traces each stage once in a process: most of what exporting a tiny model takes, and always the same.

A stage's graph depends on its module and its contract, on all that is in them: the key holds every attribute, the
numbers of every tensor, and which tensors are one. Where they are the same, a copy of the first graph is handed out;
the checkpoint's own weights are put in afterwards, as ever.
"""

import hashlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

_AS_EVER: list[Any] = []


@pytest.fixture(scope="session", autouse=True)
def traced_once() -> Iterator[None]:
    """Remembers graphs for as long as the tests run; several folders ask for it, the first one gets it."""
    if _AS_EVER:
        yield
        return
    from mirrorsd.export.passes import torch_to_onnx

    trace, graphs = torch_to_onnx.trace, {}
    _AS_EVER.append(trace)

    def remembered(module: Any, contract: Any) -> Any:
        from torch.onnx import ONNXProgram

        key = key_of(module, contract)
        if key is None:
            return trace(module, contract)
        if key not in graphs:
            graphs[key] = trace(module, contract).model
        return ONNXProgram(graphs[key].clone(), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_to_onnx, "trace", remembered)
        yield


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that changes how stages compute: no key shows that."""
    monkeypatch.setattr("mirrorsd.export.passes.torch_to_onnx.trace", _AS_EVER[0])


def key_of(*things: Any) -> str | None:
    """A digest of all that the things consist of; None where something in them cannot be written down."""
    stream = io.BytesIO()
    try:
        _Describing(stream).dump(things)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


class _Describing(pickle.Pickler):
    """Writes tensors as what is in their memory, and everything else as ever."""

    def reducer_override(self, thing: Any) -> Any:
        import torch

        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        held = thing.detach().untyped_storage()
        numbers = hashlib.sha256(bytes(held)).hexdigest()
        return str, (f"{type(thing)} {thing.dtype} {thing.shape} {thing.stride()} {thing.storage_offset()} {numbers}",)
