"""Whatever kind of blocks a file has: what is read of it, some rows at a time, are the `gguf` package's floats."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from mirrorsd.export.weights import gguf_tensors
from mirrorsd.export.weights.gguf_tensors import GgufTensor

NAMES = [kind.name for kind in gguf.GGMLQuantizationType if kind in quants._type_traits]
ROWS, WIDTH = 50, 512


@pytest.mark.parametrize("name", [*NAMES, "F32", "F16"])
def test_chunks_are_the_packages_floats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tensors, "_AT_ONCE", 7 * WIDTH)
    monkeypatch.setattr(gguf_tensors, "CHUNK_BYTES", 4 * 20 * WIDTH)
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    content = np.random.default_rng(3).integers(0, 256, (ROWS, WIDTH // block * size), np.uint8)
    order = np.random.default_rng(4).permutation(ROWS)
    tensor = GgufTensor(
        path=Path("model.gguf"),
        name="weight",
        dtype=name,
        shape=(ROWS, WIDTH),
        offset=0,
        content=content,
        kind=kind,
        order=order,
        convert=lambda floats: floats,
    )
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = quants.dequantize(content, kind)[order]
        chunks = list(tensor.chunks(torch.float32))
    assert len(chunks) > 1
    np.testing.assert_array_equal(torch.cat(chunks).numpy(), wanted)
