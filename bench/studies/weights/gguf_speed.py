"""How many of a GGUF file's numbers are best undone together.

    python bench/studies/weights/gguf_speed.py MODEL.gguf --output gguf_speed.json

Millions of numbers a second on one core, by how many at once, for each kind of block: its largest tensor, some rows.
"""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mirrorsd.bench import runs
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.weights import gguf_tensors

_AT_ONCE = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    largest: dict[str, Any] = {}
    for tensor in open_checkpoint(options.file, "target").tensors.values():
        if len(tensor.shape) == 2 and tensor.size > getattr(largest.get(tensor.dtype), "size", 0):
            largest[tensor.dtype] = tensor
    rows = [{"kind": kind, **speeds(tensor)} for kind, tensor in largest.items()]
    print(*rows, sep="\n")
    runs.finish({"file": options.file.name, "rows": rows}, options.output)


def speeds(tensor: Any) -> dict[str, int]:
    """Of one tensor, by numbers at once."""
    found = {}
    for size in _AT_ONCE:
        with patch.object(gguf_tensors, "_AT_ONCE", size):
            started, count = time.perf_counter(), 0
            for chunk in tensor.chunks(torch.float32):
                count += chunk.numel()
            found[str(size)] = round(count / 1e6 / (time.perf_counter() - started))
    return found


if __name__ == "__main__":
    main()
