"""What asking ONNX Runtime for exact sums costs products of integers, beside products of blocks.

    python bench/studies/weights/asked_precision.py CONFIG.json --output asked_precision.json

`CONFIG.json` is a target's. Two of its layers' products have random weights and run by turns on one core, as when an
export chooses between the forms. `ms 8` is the least time of eight rows. The first row of integers is how targets are
opened on this processor (`providers.ask_for_exact_integers`).
"""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import onnxruntime as ort

from mirrorsd.bench import runs
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.devices.onnxruntime.providers import sums_are_exact
from mirrorsd.export import ExportOptions, integer_choice
from mirrorsd.graphs import names


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("config", type=Path)
    options = parser.parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    blocks = ExportOptions(precision="int8").formats(int(config["hidden_size"])).layers
    assert blocks is not None
    shapes, integers = integer_choice._shapes(config), replace(blocks, is_by_row=True)
    forms = {"integers": integer_choice._products(shapes, integers)}
    with patch.object(integer_choice, "ask_for_exact_integers", _ask):
        forms["integers, asked for precision"] = integer_choice._products(shapes, integers)
    forms["blocks"] = integer_choice._products(shapes, blocks)
    sizes, found = integer_choice._ROWS, integer_choice._seconds(*forms.values())
    rows = [
        {"products": name}
        | {f"ms {size}": round(1e3 * float(one), 3) for size, one in zip(sizes, seconds, strict=True)}
        for name, seconds in zip(forms, found, strict=True)
    ]
    runs.print_rows(rows, tuple(rows[0]))
    where = {"config": options.config.name, "machine": describe_machine(), "versions": installed_versions()}
    runs.finish(where | {"sums_are_exact": sums_are_exact(), "rows": rows}, options.output)


def _ask(options: ort.SessionOptions) -> None:
    options.add_session_config_entry(*names.EXACT_INTEGERS)


if __name__ == "__main__":
    main()
