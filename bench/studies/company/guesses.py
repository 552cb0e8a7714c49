"""Windows in company on a machine whose pace changes, simulated: tokens per second, with other numbers too.

    python bench/studies/company/guesses.py
    python bench/studies/company/guesses.py --with _MEMORY=0.99 --with _ASSUMED_GUESSES=3

Two to four texts share passes. What a pass takes is made up: 12 ms, 2 for each text, so much for each guess, times the
pace, with noise, and now and then one is held up. `PassTimes` and `WindowLength` see nothing but that, and decide;
the former is told, too, what a row takes at the first pace.
Phases last 100 to 200 passes; the second is three times slower, the fourth 1.6 times. Tokens are held against the time
that passes would have taken at the first pace without noise. `known` are windows of whoever is told what a guess takes.
`--with` takes a number of `runtime/devices/pass_times.py`.
"""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.bench import runs
from mirrorsd.runtime.devices import pass_times
from mirrorsd.runtime.ledger import Joint
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.policy.windows import LearnedLengths, WindowLength

_PHASES = ((1.0, 200), (3.0, 100), (1.0, 100), (1.6, 100), (1.0, 200))
_PASS_S, _TEXT_S, _GUESSES_S, _NOISES = 0.012, 0.002, (0.0003, 0.001, 0.002, 0.004), (0.05, 0.25)
_MOST_TEXTS, _LONGEST, _SURE, _HELD_UP, _REPEATS = 4, 6, 0.7, 0.03, 8
_LOAD_MS = ((1.0, 14.0), (7.0, 20.0))


class Law(NamedTuple):
    """What a guess takes, seconds; how much passes vary, as the deviation of a logarithm."""

    guess_s: float
    noise: float


def main() -> None:
    """Simulate and print."""
    parser = runs.parser(__doc__)
    parser.add_argument("--with", dest="numbers", action="append", default=[], type=runs.changed, metavar="NAME=VALUE")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for law in (Law(*values) for values in product(_GUESSES_S, _NOISES)):
        told = speeds_of(law, is_told=True)
        for number in (None, *options.numbers):
            with runs.with_changed(number, [pass_times]):
                found = speeds_of(law, is_told=False)
            phases = {f"phase {place}": float(speed) for place, speed in enumerate(found.mean(0), 1)}
            mean = {"mean": float(found.mean()), "least": float(found.min()), "known": float(told.mean())}
            rows.append({"guess_ms": 1e3 * law.guess_s, "noise": law.noise, "with": str(number or "")} | phases | mean)
    runs.print_rows(rows, [*rows[0]])
    runs.finish({"rows": rows}, options.output)


def speeds_of(law: Law, *, is_told: bool) -> NDArray[np.float64]:
    """Tokens per second of each phase, `[repeats, phases]`."""
    return np.array([[*simulated(law, np.random.default_rng(seed), is_told=is_told)] for seed in range(_REPEATS)])


def simulated(law: Law, dice: np.random.Generator, *, is_told: bool) -> Iterator[float]:
    """Tokens per second of each phase."""
    times, learned = pass_times.PassTimes(law.guess_s / (_PASS_S + _TEXT_S)), LearnedLengths()
    weights = RootScores().weights("draft", 0, is_sampling=False).accept
    texts, joint = [WindowLength(_LOAD_MS, weights, learned) for _ in range(_MOST_TEXTS)], Joint()
    for pace, num_passes in _PHASES:
        tokens, spent = 0, 0.0
        for _ in range(num_passes):
            present = texts[: _MOST_TEXTS if dice.random() < 0.7 else int(dice.integers(2, _MOST_TEXTS + 1))]
            sure = [np.clip(dice.beta(4 * _SURE, 4 - 4 * _SURE, _LONGEST), 1e-3, 0.999) for _ in present]
            lengths = [cut(text, chances, joint) for text, chances in zip(present, sure, strict=True)]
            clean = _PASS_S + _TEXT_S * len(present) + law.guess_s * sum(lengths)
            delay = dice.uniform(1.5, 4.0) if dice.random() < _HELD_UP else 1.0
            seconds = pace * clean * delay * float(np.exp(law.noise * dice.normal()))
            times.observe(seconds, [_made_up(1 + length) for length in lengths])
            joint = known_joint(len(present), pace, law) if is_told else told_joint(len(present), times)
            for text, length, chances in zip(present, lengths, sure, strict=True):
                num_right = int(np.argmin([*(dice.random(length) < chances[:length]), False]))
                text.observe(length, num_right, seconds)
                tokens += 1 + num_right
            spent += clean
        yield tokens / spent


def cut(text: WindowLength, chances: NDArray[np.float64], joint: Joint) -> int:
    """The length of a text's next window, of a draft that is so sure of its tokens."""
    text.joint = joint
    limit = min(_LONGEST, joint.most_guesses)
    shares = list(zip(np.log(chances).tolist(), np.log1p(-chances).tolist(), strict=True))
    length = text.cut(shares, _LONGEST, limit)
    text.begin()
    return length


def told_joint(num_texts: int, times: pass_times.PassTimes) -> Joint:
    """What `Company.run` tells texts."""
    return bound(Joint(num_texts - 1, times.of_guess, texts_s=times.of_texts(num_texts)), num_texts)


def known_joint(num_texts: int, pace: float, law: Law) -> Joint:
    """The same, of whoever knows."""
    return bound(Joint(num_texts - 1, pace * law.guess_s, texts_s=pace * (_PASS_S + _TEXT_S * num_texts)), num_texts)


def bound(joint: Joint, num_texts: int) -> Joint:
    """No more guesses than take as long as the texts."""
    most = int(joint.texts_s / joint.guess_s / num_texts) if joint.guess_s else joint.most_guesses
    return joint._replace(most_guesses=max(1, most))


def _made_up(num_rows: int) -> Any:
    return SimpleNamespace(tokens=range(num_rows), with_logits=False, start=0)


if __name__ == "__main__":
    main()
