"""What rotating rows before a product of integers brings: errors by how many numbers are rotated, and a layer's speed.

    python bench/studies/weights/rotated_rows.py TARGET --output rotated_rows.json

Errors are those of `scaling_of`: of each layer's last product's mean square, by row as it is, then with 32 to 256
numbers rotated into each other. The gain is that of a layer's products over blocks, by which an export decides.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from mirrorsd.bench import runs
from mirrorsd.export import ExportOptions
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.integer_choice import gain_of_rotation
from mirrorsd.export.passes import input_scaling
from mirrorsd.export.passes.aware_quantisation import collect_inputs
from mirrorsd.export.verify.quality import range_windows
from mirrorsd.export.weights import rotation

_SIZES = (32, 64, 128, 256)


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    target = open_checkpoint(options.target, "target")
    model, wide = open_model(target), int(target.config["intermediate_size"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        inputs = collect_inputs(model, range_windows(target, None, 2048), Path(folder))
        modules = input_scaling._modules_by_name(model)
        for name, path in inputs.files.items():
            given = torch.from_numpy(np.load(path).astype(np.float32))
            if given.shape[1] == wide:
                rows.append({"weight": name, **errors(given, input_scaling._by_output(model, modules[name]))})
                print(rows[-1])
    gain = gain_of_rotation(target.config, ExportOptions(precision="int8").formats(int(target.config["hidden_size"])))
    print(f"a layer's products: {gain:.2f} times as fast")
    runs.finish({"target": options.target.name, "gain": round(gain, 3), "rows": rows}, options.output)


def errors(given: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Of one product, as it is and with so many numbers rotated."""
    found = {"as it is": input_scaling.scaling_of(given, weight, is_normed=False)[1]}
    for size in _SIZES:
        with patch.object(input_scaling, "rotate", partial(rotation.rotate, size=size)):
            found[str(size)] = input_scaling.scaling_of(given, weight, is_normed=False, is_rotated=True)[1]
    return {name: round(error, 6) for name, error in found.items()}


if __name__ == "__main__":
    main()
