"""What trees bring: siblings beside the draft's windows, and trees of heads, replayed at the times of paced cards.

    mirrorsd simulate smollm2.mirror --record smollm2.npz --temperature 0 --methods plain
    python bench/studies/trees/paced_trees.py smollm2.npz OTHER.npz --output trees.json

Of the draft, `serial`, `mirror` and `auto` are replayed by the runtime's own scheduler, without siblings and with at
most 8 and 16 of them. Of heads, which make chains in the runtime, it is worked out: a step takes a pass over the rows,
the head's run and the host's time; the tree has the likeliest of the head's candidates, those behind a sibling being
what the head thinks behind its own guess. Every ratio is a tree's tokens per second over the chain's.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import Pace, interpolate, load_device_map
from mirrorsd.graphs.manifest import Head
from mirrorsd.machine.tuning.recording import RecordedText, Recording
from mirrorsd.machine.tuning.simulation import (
    HEAD_HOST_MS,
    HOST_MS,
    ReplayChooser,
    Scenario,
    mean_of,
    simulate,
    tokens_per_second,
)
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.speculation import speculation_of

CARDS = ("paced-laptop", "paced-lunar-lake", "paced-panther-lake", "paced-arrow-lake", "paced-paper")
METHODS = ("serial", "mirror", "auto")
SIBLINGS = (8, 16)
NODES = (8, 16, 32)
"""Guesses of a head's tree."""


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
            for row in (*of_draft(recording, card), *of_heads(recording, card)):
                report["rows"].append({**given, "card": card, **row})
                print(json.dumps(report["rows"][-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def of_draft(recording: Recording, card: str) -> Iterator[dict[str, Any]]:
    """By method and number of siblings: speed over that without, and tokens per step."""
    found = load_device_map(card)
    assert found.pace is not None
    for method in METHODS:
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


def of_heads(recording: Recording, card: str) -> Iterator[dict[str, Any]]:
    """By head and number of guesses."""
    pace = load_device_map(card).pace
    assert pace is not None
    for head in recording.heads:
        chain = 0.0
        for nodes in (0, *NODES):
            speed, per_step = speed_of_head(recording, head, pace, nodes)
            chain = chain or speed
            figures = {"ratio": round(speed / chain, 3), "tokens_per_step": round(per_step, 3)}
            yield {"method": head.kind, "nodes": nodes, "tokens_per_second": round(speed, 2), **figures}


def speed_of_head(recording: Recording, head: Head, pace: Pace, nodes: int) -> tuple[float, float]:
    """Tokens per second and per step of a tree of so many guesses; of the head's chain where that is 0."""
    num_tokens, num_steps, ms = 0, 0, 0.0
    for text in recording.texts:
        shares = shares_of(recording, text, head.kind)
        place = 0
        while place < text.num_heads:
            ids = text.head_ids[head.kind][place]
            paths = best_paths(shares[place], nodes) if nodes else [(0,) * depth for depth in range(1, len(ids) + 1)]
            truth = text.tokens[text.num_prompt + place :]
            depth = accepted(paths, ids, truth[: text.num_heads - place]) if (ids >= 0).all() else 0
            ms += interpolate(pace.target_ms, 1 + len(paths)) + HOST_MS + HEAD_HOST_MS
            ms += pace.head_ms(head.read_share, depth + 1)
            num_tokens, num_steps, place = num_tokens + depth + 1, num_steps + 1, place + depth + 1
    return 1e3 * num_tokens / ms, num_tokens / num_steps


def shares_of(recording: Recording, text: RecordedText, kind: str) -> Any:
    """`[P, K, m]`: how likely each candidate is among those of its guess, with the noise of a sampled text."""
    config = GenerationConfig(temperature=recording.temperature or None, seed=text.seed)
    chooser = ReplayChooser(config.resolve())
    ids, logprobs = text.head_ids[kind], text.head_logprobs[kind]
    positions = text.num_prompt + np.arange(len(ids))[:, None] + np.arange(ids.shape[1])[None]
    scores = chooser.rank(np.maximum(ids, 0), logprobs, positions).astype(np.float64)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def best_paths(shares: Any, nodes: int) -> list[tuple[int, ...]]:
    """The likeliest paths of ranks, each with its own beginnings.

    >>> best_paths(np.array([[0.6, 0.4], [0.9, 0.1]]), 3)
    [(0,), (0, 0), (1,)]
    """
    offers: list[tuple[float, tuple[int, ...]]] = [(-float(share), (rank,)) for rank, share in enumerate(shares[0])]
    found: list[tuple[int, ...]] = []
    while offers and len(found) < nodes:
        best = min(offers)
        offers.remove(best)
        found.append(best[1])
        if len(best[1]) < len(shares):
            offers += [(best[0] * float(share), (*best[1], rank)) for rank, share in enumerate(shares[len(best[1])])]
    return found


def accepted(paths: Sequence[tuple[int, ...]], ids: Any, truth: Any) -> int:
    """How many tokens of the text such a tree accepts."""
    known, path = set(paths), tuple[int, ...]()
    for depth, token in enumerate(truth[: len(ids)]):
        ranks = np.flatnonzero(ids[depth] == token)
        if not len(ranks) or (*path, int(ranks[0])) not in known:
            break
        path = (*path, int(ranks[0]))
    return len(path)


if __name__ == "__main__":
    main()
