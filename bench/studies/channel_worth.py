"""What longer branches would be worth, were they made with hidden states: recordings that are put right at random.

    mirrorsd simulate BUNDLE --temperature 0 --record greedy.npz
    mirrorsd simulate BUNDLE --temperature 1 --seed 1 --record sampled.npz
    python bench/studies/channel_worth.py greedy.npz sampled.npz --layer 3 --output channel_worth.json

A draft that reads the target's hidden states at a branch's root has to wait for them. Here it needs no training: of
what a recorded draft says wrong along a text, behind every root, a `share` becomes right. The real scheduler then runs
on devices of a card's pace. Without hidden states (`early`) and with them, once they are there (`features`), or in
serial decoding, where nobody waits for them. The draft that was recorded stays what it is wherever a row has none.
A draft that does read hidden states was recorded with them: what it says is measured, too, as it is (`share` None).
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirrorsd.bench import runs
from mirrorsd.device_maps import load_device_map
from mirrorsd.runtime.loading import speculation_of
from mirrorsd.runtime.tuning.recording import RecordedText, Recording
from mirrorsd.runtime.tuning.simulation import Scenario, mean_of, simulate, tokens_per_second

CARDS = ("paced-laptop", "paced-paper", "paced-panther-lake", "paced-arrow-lake")
WAYS = (("serial", "early"), ("mirror", "early"), ("mirror", "features"), ("mirror", "progressive"))
"""Methods and their `root_source`."""


def put_right(text: RecordedText, share: float, random: np.random.Generator) -> RecordedText:
    """Let the draft say, behind roots with hidden states, a `share` of the text's tokens that it has wrong."""
    ids, logprobs, windows = text.draft_ids.copy(), text.draft_logprobs.copy(), text.windows.copy()
    for head in range(1, len(windows)):
        source, depth, follows = head, 0, True
        for step in range(text.depth + 1):
            ids[head, step] = text.draft_ids[source, depth]
            logprobs[head, step] = text.draft_logprobs[source, depth]
            truth = text.tokens[text.num_prompt + head + step :]
            if follows:
                for guesses, token in zip(ids[head, step], truth, strict=False):
                    correct(guesses, int(token), share, random)
            if step == text.depth:
                break
            windows[head, step] = ids[head, step, 0, 0]
            follows = follows and len(truth) > 1 and bool(windows[head, step] == truth[0])
            source, depth = (head + step + 1, 0) if follows else (source, depth + 1)
    return replace(text, reading_windows=windows, reading_ids=ids, reading_logprobs=logprobs)


def correct(guesses: NDArray[np.int64], token: int, share: float, random: np.random.Generator) -> None:
    """Put `token` in front of `guesses [m]` with chance `share`, if it is not; the first takes its place.

    >>> guesses = np.array([5, 6, 7]); correct(guesses, 7, 1.0, np.random.default_rng(0)); guesses.tolist()
    [7, 6, 5]
    """
    if guesses[0] != token and random.random() < share:
        found = np.flatnonzero(guesses == token)
        guesses[found[0] if len(found) else -1] = guesses[0]
        guesses[0] = token


def accepted(texts: Sequence[RecordedText], windows: Sequence[NDArray[np.int64]]) -> float:
    """Mean of the leading tokens of `windows [P, D]` that are the text's own, behind every head but the first."""
    counts = [
        replace(text, windows=of_text).outcome(head, text.depth)[0]
        for text, of_text in zip(texts, windows, strict=True)
        for head in range(1, text.num_heads)
    ]
    return float(np.mean(counts))


def measure(recording: Recording, layer: int, shares: Sequence[float], cards: Sequence[str]) -> list[dict[str, Any]]:
    """Speeds by share, card and way."""
    rows = []
    for share in [*([None] if recording.feature_layer else []), *shares]:
        random = np.random.default_rng(0)
        texts = recording.texts
        if share is not None:
            texts = tuple(put_right(text, share, random) for text in texts)
        windows = [text.reading_windows for text in texts if text.reading_windows is not None]
        gain = accepted(texts, windows) / accepted(texts, [text.windows for text in texts])
        reading = replace(recording, texts=texts, feature_layer=layer)
        for card in cards:
            speeds: dict[str, Any] = {"temperature": recording.temperature, "device_map": card, "share": share}
            speeds["branches"] = round(gain, 3)
            for method, source in WAYS:
                speeds |= {method if method == "serial" else source: of_way(reading, card, layer, (method, source))}
            rows.append(speeds)
            print(speeds, flush=True)
    return rows


def of_way(recording: Recording, card_name: str, layer: int, way: tuple[str, str]) -> dict[str, float]:
    """Tokens per second and per step."""
    card, (method, source) = load_device_map(card_name), way
    if card.pace is None:
        raise SystemExit(f"the card {card_name} has no pace")
    speculation = replace(speculation_of(card), root_source=source)
    stats = simulate(recording, Scenario(pace=card.pace, speculation=speculation, method=method, layers=(layer,)))
    return {
        "tokens_per_second": round(tokens_per_second(stats), 1),
        "per_step": round(mean_of(stats, "tokens_per_step"), 3),
    }


def main() -> int:
    """Read recordings, put them right, replay them, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path, metavar="RECORDING")
    parser.add_argument("--layer", type=int, required=True, help="the exit's layer, where the hidden states are")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.1, 0.25])
    parser.add_argument("--cards", nargs="+", default=CARDS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = [Recording.read(path) for path in options.recordings]
    rows = [row for one in found for row in measure(one, options.layer, options.shares, options.cards)]
    texts = [len(one.texts) for one in found]
    report = runs.header(options.recordings[0], simulated=True, layer=options.layer, shares=options.shares, texts=texts)
    runs.finish(report | {"rows": rows}, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
