"""What the bounds of stored weights decide: exports of one pair with other bounds, their quality and their passes.

    python bench/studies/weights/integer_bounds.py TARGET DRAFT --set most_error=0.0005 --set most_error=1
    python bench/studies/weights/integer_bounds.py TARGET DRAFT --of finer --set finer_share=0.1 --set parts=1

The first row has the bounds as they are, each further one those that it names (joined by commas). Those of integer
products are "most_error" (a product that loses more keeps blocks), `dearer` (one range for all rows) and "worth_a_node"
(factors where no norm takes them in). Those of `finer` layers beside four bits are "finer_share" (of the weights, the
most in eight) and `parts` (of a kind that is too large). Says how many kinds of products are in blocks, or finer, the
target's megabytes, the best tokens kept and the perplexity on the export's own text, and the milliseconds of passes of
1, 8 and 16 rows.
"""

import json
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.device_maps import interpolate
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.passes import input_scaling
from mirrorsd.export.verify import sensitive_layers
from mirrorsd.runtime.loading import measure_passes

ROWS = (1, 8, 16)
BOUNDS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "integer": (input_scaling, {"precision": "int8", "draft_precision": "int8", "products": "integer"}),
    "finer": (sensitive_layers, {"precision": "int4", "rounding": "gptq"}),
}
"""By kind: where they stand, and the exports that have them."""
TURNS = 10
"""Of measuring the passes, one after the other: the shortest counts."""


def main() -> None:
    """Export, measure, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--of", choices=BOUNDS, default="integer", help="which bounds, and so which exports")
    parser.add_argument("--set", action="append", default=[], help="BOUND=NUMBER, or several joined by commas")
    options = parser.parse_args()
    rows, (module, made) = [], BOUNDS[options.of]
    for given in ("", *options.set):
        bounds = dict(pair.split("=") for pair in given.split(",") if pair)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as changed:
            for bound, number in bounds.items():  # an unknown one raises `AttributeError`
                name = next((name for name in vars(module) if name.strip("_") == bound.upper()), bound)
                changed.enter_context(patch.object(module, name, json.loads(number)))
            found = measure(options.target, options.draft, Path(folder) / "b", ExportOptions(**made))
            rows.append({"bounds": given or "as they are"} | found)
        runs.print_rows(rows[-1:], tuple(rows[0]))
    header = runs.header(options.target, target=str(options.target), draft=str(options.draft))
    runs.finish(header | {"rows": rows}, options.output)


def measure(target: Path, draft: Path, bundle: Path, made: ExportOptions) -> dict[str, Any]:
    """One export: its quality, and its passes."""
    manifest = export_pair(target, draft, bundle, made)
    quality, storage = manifest.quality, manifest.target.storage
    assert quality is not None and storage is not None  # an export of rounded weights has both
    with MirrorPipeline.load(bundle, device_map="cpu", use_tuned=False) as pipe:
        worker, job = pipe.engine.target_worker, partial(measure_passes, pipe.engine.target_model, max(ROWS))
        curves = [worker.submit(job).result() for _ in range(TURNS)]
    times = {f"{rows} rows": round(min(interpolate(curve, rows) for curve in curves), 2) for rows in ROWS}
    return {
        "kinds": len(storage.finer),
        "MB": round((bundle / manifest.target.weights_file).stat().st_size / 1e6, 2),
        "kept": round(quality.top1_agreement, 4),
        "perplexity": round(quality.perplexity / quality.reference_perplexity - 1, 4),
    } | times


if __name__ == "__main__":
    main()
