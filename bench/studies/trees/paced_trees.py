"""What trees bring: siblings beside windows of the draft and of heads, replayed at the times of paced cards.

    mirrorsd simulate smollm2.mirror --record smollm2.npz --temperature 0 --methods plain
    python bench/studies/trees/paced_trees.py smollm2.npz OTHER.npz --output trees.json

`serial`, `mirror`, `auto` and every head of the recording are replayed by the runtime's own scheduler, without siblings
and with at most 8 and 16 of them. Every ratio is the tokens per second with siblings over those without.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import load_device_map
from mirrorsd.machine.tuning.recording import Recording
from mirrorsd.machine.tuning.simulation import Scenario, mean_of, simulate, tokens_per_second
from mirrorsd.texts.speculation import speculation_of

CARDS = ("paced-laptop", "paced-lunar-lake", "paced-panther-lake", "paced-arrow-lake", "paced-paper")
METHODS = ("serial", "mirror", "auto")
SIBLINGS = (8, 16)


def main() -> None:
    """Replay, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--cards", nargs="+", default=CARDS)
    parser.add_argument("--texts", type=int, default=40, help="of each recording, spread over it")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"simulated": True, "machine": describe_machine()}
    report |= {"versions": installed_versions(), "rows": []}
    for path in options.recordings:
        recording = Recording.read(path)
        step = -(-len(recording.texts) // options.texts)
        recording = replace(recording, texts=recording.texts[::step])
        given = {"recording": path.stem, "temperature": recording.temperature, "texts": len(recording.texts)}
        for card in options.cards:
            for row in ratios(recording, card):
                report["rows"].append({**given, "card": card, **row})
                print(json.dumps(report["rows"][-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def ratios(recording: Recording, card: str) -> Iterator[dict[str, Any]]:
    """By method and number of siblings: speed over that without, and tokens per step."""
    found = load_device_map(card)
    assert found.pace is not None
    for method in (*METHODS, *(head.kind for head in recording.heads)):
        before = 0.0
        for siblings in (0, *SIBLINGS):
            speculation = replace(speculation_of(found), siblings=siblings)
            stats = simulate(recording, Scenario(pace=found.pace, speculation=speculation, method=method))
            speed = tokens_per_second(stats)
            before = before or speed
            figures = {
                "ratio": round(speed / before, 3),
                "tokens_per_step": round(mean_of(stats, "tokens_per_step"), 3),
            }
            yield {"method": method, "siblings": siblings, "tokens_per_second": round(speed, 2), **figures}


if __name__ == "__main__":
    main()
