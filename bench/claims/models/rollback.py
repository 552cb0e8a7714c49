"""What it costs a hybrid to take back rejected rows: a window's accepted rows through the recurrence alone (Linux).

    python bench/studies/export_memory.py --size hybrid --precision int8 --folder scratch --keep
    python bench/claims/models/rollback.py scratch/hybrid-int8.mirror --layout shared

`hybrid` has the layers of Qwen3.5-0.8B, 24 of them, 18 recurrent. By turns: a pass of one row, and one over a window of
8 rows of which 1 to 7 are accepted, whose states are then made from what its rows fed to the recurrence. Medians, and
the rollback's over the pass's; `parts` says how much of a rollback is ONNX Runtime's own run.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.runtime.backends.onnxruntime.states import RecurrentStates
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget
from mirrorsd.runtime.ledger import Ledger

WINDOW, CACHED = 8, 64


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--layout")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with MirrorPipeline.load(options.bundle, device_map="cpu", layout=options.layout, use_tuned=False) as pipe:
        worker = pipe.engine.target_worker
        session: Any = worker.run(pipe.engine.target_model.new_session)
        seconds = worker.run(lambda: measured(session, options.repeats))
        shape = pipe.manifest.target.shape
        layout = pipe.layout
    one_row = median(seconds["pass"])
    report: dict[str, Any] = {
        **runs.header(options.bundle, layout=layout),
        "layers": shape.num_layers,
        "recurrent_layers": len(shape.recurrent_layers),
        "state_bytes": shape.state_bytes,
        "pass_of_one_row_ms": round(1000 * one_row, 3),
        "rollback_ms": round(1000 * median(seconds["rollback"]), 3),
        "rollback_over_pass": round(median(seconds["rollback"]) / one_row, 4),
        "by_accepted_rows": {
            accepted: round(median(seconds[f"{accepted}"]) / one_row, 4) for accepted in range(1, WINDOW)
        },
        "parts": {"run_ms": round(1000 * median(seconds["run"]), 3)},
    }
    print(json.dumps(report, indent=2))
    runs.finish(report, options.output)


def measured(session: OnnxTarget, repeats: int) -> dict[str, list[float]]:
    """Seconds of passes of one row, of rollbacks (all, and by accepted rows), and of the recurrence's runs in them."""
    states = session._states
    assert states is not None  # the bundle is a hybrid's
    tokens = np.arange(CACHED + WINDOW) % session.vocab_size
    session.prefill(tokens[:CACHED], 0, ledger=Ledger())
    found: dict[str, list[float]] = {name: [] for name in ("pass", "rollback", "run", *map(str, range(1, WINDOW)))}
    run = states._accepted._stage.run

    def timed(*given: Any) -> None:
        started = perf_counter()
        run(*given)
        found["run"].append(perf_counter() - started)

    stage: Any = states._accepted._stage
    stage.run = timed
    for turn in range(repeats):
        for accepted in range(1, WINDOW):
            took = seconds_of_rollback(session, states, tokens, accepted)
            started = perf_counter()
            session.run(tokens[:1], CACHED + accepted, with_logits=False, ledger=Ledger())
            if turn:  # the first one binds
                found["rollback"].append(took)
                found[f"{accepted}"].append(took)
                found["pass"].append(perf_counter() - started)
    return found


def seconds_of_rollback(session: OnnxTarget, states: RecurrentStates, tokens: Any, accepted: int) -> float:
    """Run a window behind the cached rows, and then only the recurrence over the accepted ones."""
    session.run(tokens[CACHED:], CACHED, with_logits=False, ledger=Ledger())
    started = perf_counter()
    states.begin(CACHED + accepted)
    return perf_counter() - started


if __name__ == "__main__":
    main()
