"""What stands beside a streaming draft's weights: read whole, or refused with its name and what was expected."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mirrorsd.export.checkpoints.loading import load_streams
from mirrorsd.graphs.errors import ExportError

HIDDEN, LAYERS, RANK = 32, 3, 4


def write(folder: Path, version: int = 2, layers: str = "2", **changed: torch.Tensor | None) -> Path:
    tensors: dict[str, torch.Tensor | None] = {"stream_embeddings": torch.ones(3, HIDDEN)}
    for place in range(3 if version >= 2 else 0):
        tensors[f"adapters.{place}.down.weight"] = torch.full((RANK, HIDDEN), float(place))
        tensors[f"adapters.{place}.up.weight"] = torch.full((HIDDEN, RANK), float(place))
    if version == 3:
        tensors |= {f"link.{name}.weight": torch.ones(RANK, HIDDEN) for name in ("down", "last", "earlier")}
        tensors["link.up.weight"] = torch.ones(HIDDEN, RANK)
    tensors |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    written = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    metadata = {"format": f"mirrorsd-streams-{version}", "num_stream_layers": layers}
    save_file(written, folder / "streams.safetensors", metadata)
    return folder


@pytest.mark.parametrize(("version", "places"), [(1, []), (2, [0.0, 1.0, 2.0]), (3, [0.0, 1.0, 2.0])])
def test_every_version_is_read(tmp_path: Path, version: int, places: list[float]) -> None:
    streams = load_streams(write(tmp_path, version), HIDDEN, LAYERS)
    assert streams is not None
    assert (streams.embeddings.shape, streams.num_stream_layers) == ((3, HIDDEN), 2)
    assert [(down[0, 0].item(), up[0, 0].item()) for down, up in streams.adapters] == [(at, at) for at in places]
    shapes = [tuple(matrix.shape) for matrix in streams.link or ()]
    assert shapes == ([(RANK, HIDDEN)] * 3 + [(HIDDEN, RANK)] if version == 3 else [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"adapters__2__up__weight": None},
            r"'adapters.2.up.weight' have shapes \(4, 32\) and \(0,\); expected \(rank, 32\)",
        ),
        ({"adapters__0__down__weight": torch.ones(RANK, 8)}, r"have shapes \(4, 8\) and \(32, 4\)"),
        ({"stream_embeddings": torch.ones(3, 8)}, r"needs 'stream_embeddings' of shape \[s, 32\]"),
        ({"layers": "4"}, r"num_stream_layers = 4; this draft allows 1..3"),
        (
            {"version": 3, "link__last__weight": torch.ones(RANK, 8)},
            r"'link.last.weight' and 'link.up.weight' have shapes \(4, 8\) and \(32, 4\)",
        ),
        ({"version": 3, "link__up__weight": None}, r"'link.up.weight' have shapes \(4, 32\) and \(0,\)"),
        (
            {"version": 4},
            r"'mirrorsd-streams-4'; this mirrorsd reads 'mirrorsd-streams-1' and 'mirrorsd-streams-2' and",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changed: dict, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        load_streams(write(tmp_path, **changed), HIDDEN, LAYERS)
