"""How far a mask that is followed and one that is ignored are from each other: what `MOST_APART` lies between.

    python bench/studies/trees/mask_probe.py storyteller.mirror smollm2.mirror --output mask_probe.json

A bundle's target is opened with masked stages, on ONNX Runtime's processor provider, as it is (`right`), with every
mask that of a chain (`mask`), and with every row at the place that it has in a chain (`table_rows`). Said is how far
the rows of the tree that is tried at load are then from those of its chains alone, over the spread of these.
"""

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mirrorsd.bench import runs
from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.masked_graph import MOST_APART, RowLayout, rows_apart
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.runtime.backends.onnxruntime import target

IGNORED = ("mask", "table_rows")


def main() -> None:
    """Try, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("bundles", type=Path, nargs="+")
    options = parser.parse_args()
    rows = []
    for bundle in options.bundles:
        rows.append({"bundle": bundle.name, **tried(bundle)})
        runs.print_rows(rows[-1:], tuple(rows[-1]))
    runs.finish(runs.header(options.bundles[0], most=MOST_APART) | {"rows": rows}, options.output)


def tried(bundle: Path) -> dict[str, Any]:
    """One bundle's row."""
    entry = read_bundle(bundle).target
    with patch.object(target, "check_masks"):
        model = target.OnnxTargetModel(bundle, entry, TargetPlacement(), takes_trees=True)
    with closing(model.new_session()) as session:
        row: dict[str, Any] = {"precision": entry.precision, "right": round(rows_apart(session), 4)}
    for name in IGNORED:
        of_chain = getattr(RowLayout, name)

        def blind(layout: RowLayout, *given: Any, of: Any = of_chain) -> Any:
            return of(RowLayout(layout._count, layout._start, None), *given)

        with patch.object(RowLayout, name, blind), closing(model.new_session()) as session:
            row[name] = round(rows_apart(session), 4)
    return row


if __name__ == "__main__":
    main()
