"""Would a small tree pay? Runner-up tokens verified beside the window, on recorded texts and the paces of cards.

    python bench/tree_gain.py texts.npz --device-map paced-laptop --device-map paced-paper --output tree_gain.json

At the least certain rows the draft's runner-up is verified too, as a leaf: where it is the correction, one token more
is committed. Every leaf costs a row of the target's pass. Time per token is that of the target's pass alone, so both
shapes are seen at their best; recordings come from `mirrorsd simulate BUNDLE --record texts.npz`.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirrorsd import GenerationConfig
from mirrorsd.bench import runs
from mirrorsd.device_maps import interpolate, load_device_map
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.runtime.tuning.recording import RecordedText, Recording, new_tokens

GAMMAS = (3, 5, 7, 9, 12)
LEAVES = (0, 1, 2, 4, 12)


def main() -> None:
    """Replay every shape on every recording; print the best chain and the best tree per card; write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--device-map", action="append", required=True, help="a card with a [pace]; may be repeated")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = [describe(Recording.read(path), options.device_map) for path in options.recordings]
    report = {"simulated": True, "recordings": found}
    print(json.dumps([row["best"] for row in found], indent=1))
    runs.finish(report, options.output)


def describe(recording: Recording, cards: list[str]) -> dict[str, Any]:
    """Tokens per step by shape, and the best shapes by card."""
    shapes = [(gamma, leaves) for gamma, leaves in product(GAMMAS, LEAVES) if leaves <= gamma]
    texts = [(text, runner_ups(recording, text)) for text in recording.texts]
    rows = [{"gamma": g, "leaves": k, "tokens_per_step": round(tokens_per_step(texts, g, k), 4)} for g, k in shapes]
    best = {card: compare_shapes(rows, card) for card in cards}
    tokens = new_tokens(recording.texts)
    return {"temperature": recording.temperature, "tokens": tokens, "best": best, "rows": rows}


def runner_ups(recording: Recording, text: RecordedText) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
    """The draft's second choice at every row of every head's window `[P, D+1]`, and how far it is behind the first."""
    config = GenerationConfig(temperature=recording.temperature, seed=text.seed)
    ids, logprobs = text.draft_ids[:, :, 0], text.draft_logprobs[:, :, 0]
    positions = text.num_prompt + np.arange(ids.shape[0])[:, None] + np.arange(ids.shape[1])
    scores = TokenChooser(config).rank(ids, logprobs, positions)
    order = np.argsort(-scores, axis=-1, kind="stable")
    sorted_scores = np.take_along_axis(scores, order, axis=-1)
    second = np.take_along_axis(ids, order, axis=-1)[..., 1]
    return second, sorted_scores[..., 0] - sorted_scores[..., 1]


def tokens_per_step(
    texts: list[tuple[RecordedText, tuple[NDArray[np.int64], NDArray[np.floating]]]], gamma: int, num_leaves: int
) -> float:
    """Committed tokens per step where the `num_leaves` least certain rows of each window carry a second choice.

    Example: the window `a b c` misses at `b`, the text has `x` there, and `x` is the leaf beside `b`: committed are
    `a`, `x` and the target's token after `x`, three instead of two.
    """
    steps = tokens = 0
    for text, (second, gap) in texts:
        head = 0
        while head < text.num_heads:
            num_accepted, correction = text.outcome(head, gamma)
            advance = num_accepted + 1
            uncertain = np.argsort(gap[head, :gamma])[:num_leaves]
            is_caught = num_accepted in uncertain and second[head, num_accepted] == correction
            advance += int(is_caught and head + advance < text.num_heads)
            steps, tokens, head = steps + 1, tokens + advance, head + advance
    return tokens / steps


def compare_shapes(rows: list[dict[str, Any]], card: str) -> dict[str, Any]:
    """The chain and the tree with the least time per token on a card."""
    pace = load_device_map(card).pace
    assert pace is not None, f"{card} has no [pace]"
    costed = [
        row | {"ms_per_token": round(interpolate(pace.target_ms, 1 + row["gamma"] + row["leaves"]) / tokens, 4)}
        for row in rows
        if (tokens := row["tokens_per_step"])
    ]
    chain = min((row for row in costed if not row["leaves"]), key=lambda row: row["ms_per_token"])
    tree = min((row for row in costed if row["leaves"]), key=lambda row: row["ms_per_token"])
    gain = round(chain["ms_per_token"] / tree["ms_per_token"], 4)
    return {"chain": chain, "tree": tree, "tree_over_chain": gain}


if __name__ == "__main__":
    main()
