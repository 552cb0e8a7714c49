"""What the bounds of integer products decide: exports of one pair with other bounds, their quality and their passes.

    python bench/studies/weights/integer_bounds.py TARGET DRAFT --set most_error=0.0005 --set most_error=1

The first row has the bounds as they are, each further one those that it names (joined by commas): "most_error" (a
product that loses more keeps blocks), `dearer` (one range for all rows), "worth_a_node" (factors where no norm takes
them in). Says how many kinds of products kept blocks, the best tokens kept and the perplexity on the export's own
text, and the milliseconds of passes of 1, 8 and 16 rows.
"""

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.device_maps import interpolate
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.passes import input_scaling
from mirrorsd.runtime.loading import measure_passes

ROWS = (1, 8, 16)
TURNS = 10
"""Of measuring the passes, one after the other: the shortest counts."""


def main() -> None:
    """Export, measure, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--set", action="append", default=[], help="BOUND=NUMBER, or several joined by commas")
    options = parser.parse_args()
    rows = []
    for given in ("", *options.set):
        bounds = dict(pair.split("=") for pair in given.split(",") if pair)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as changed:
            for bound, number in bounds.items():  # an unknown one raises `AttributeError`
                changed.enter_context(patch.object(input_scaling, f"_{bound.upper()}", float(number)))
            rows.append({"bounds": given or "as they are"} | measure(options.target, options.draft, Path(folder) / "b"))
        runs.print_rows(rows[-1:], tuple(rows[0]))
    header = runs.header(options.target, target=str(options.target), draft=str(options.draft))
    runs.finish(header | {"rows": rows}, options.output)


def measure(target: Path, draft: Path, bundle: Path) -> dict[str, Any]:
    """One export: its quality, and its passes."""
    made = ExportOptions(precision="int8", draft_precision="int8", products="integer")
    manifest = export_pair(target, draft, bundle, made)
    quality, storage = manifest.quality, manifest.target.storage
    assert quality is not None and storage is not None  # an int8 export has both
    with MirrorPipeline.load(bundle, device_map="cpu", use_tuned=False) as pipe:
        worker, job = pipe.engine.target_worker, partial(measure_passes, pipe.engine.target_model, max(ROWS))
        curves = [worker.submit(job).result() for _ in range(TURNS)]
    times = {f"{rows} rows": round(min(interpolate(curve, rows) for curve in curves), 2) for rows in ROWS}
    return {
        "in blocks": len(storage.finer),
        "kept": round(quality.top1_agreement, 4),
        "perplexity": round(quality.perplexity / quality.reference_perplexity - 1, 4),
    } | times


if __name__ == "__main__":
    main()
