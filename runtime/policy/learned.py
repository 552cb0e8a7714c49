"""What texts have taught about a pair, as plain numbers that can be kept between runs: no text, no token.

Times are kept as multiples of a pass of one row, so that they hold on a machine that is slower today than yesterday.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from mirrorsd.graphs.names import HEAD_KINDS
from mirrorsd.runtime.policy.account import Knowledge, SourceKnowledge
from mirrorsd.runtime.policy.windows import LearnedLengths, Ratio

Learned = dict[str, list[float]]
"""Numbers by what they say: `greedy.plain`, `sampled.draft.main` and so on."""
_KINDS = {False: "greedy", True: "sampled"}
_SOURCES = ("draft", *HEAD_KINDS)
_LEAST, _MOST = 1e-6, 1e6
_MOST_PASSES = 2.0
"""Passes of one row that a plain step may have taken to be kept: longer ones were measured beside another program."""


def learned_of(known: Knowledge) -> Learned:
    """What is worth keeping: nothing where the target's times are unknown, of which all others are multiples.

    >>> known = Knowledge(target_ms=((1.0, 20.0), (8.0, 30.0)))
    >>> known.pairs[False].start_plain(0.030)
    >>> learned_of(known)
    {'greedy.plain': [1.5, 1.0]}
    """
    if not known.target_ms:
        return {}
    unit, found = known.target_ms[0][1] / 1e3, Learned()
    for is_sampling, kind in _KINDS.items():
        pair = known.pairs[is_sampling]
        if pair.is_plain_known and pair.plain_seconds <= _MOST_PASSES * unit:
            found[f"{kind}.plain"] = [pair.plain_seconds / unit, pair.plain_tokens]
        for name, source, lengths in _sources(known, is_sampling=is_sampling):
            if source.brought is not None:
                found[f"{kind}.{name}"] = [
                    source.brought,
                    source.draft_seconds / unit,
                    source.joining_seconds / unit,
                    *map(float, (source.joining_tokens, source.num_windows, source.pause)),
                ]
            if lengths.tokens_per_second:
                found[f"{kind}.{name}.speed"] = [lengths.tokens_per_second * unit]
            before = _ratios(LearnedLengths())
            now = {of: _numbers(ratios) for of, ratios in _ratios(lengths).items()}
            found |= {f"{kind}.{name}.{of}": values for of, values in now.items() if values != _numbers(before[of])}
    return {name: [round(value, 6) for value in values] for name, values in found.items()}


def check_learned(learned: Mapping[str, Sequence[float]]) -> None:
    """Refuse what cannot have been learned.

    Raises:
        ValueError: an unknown name, another number of values than it has, or a value out of its range.
    """
    sizes = {"plain": 2, "speed": 1} | {of: 2 * len(ratios) for of, ratios in _ratios(LearnedLengths()).items()}
    for key, values in learned.items():
        kind, _, rest = key.partition(".")
        name, _, of = rest.partition(".")
        is_known = kind in _KINDS.values() and (name in (*_SOURCES, "plain") if not of else name in _SOURCES)
        if not is_known or len(values) != sizes.get(of or name, 6 if not of else -1):
            raise ValueError(f"learned has {key!r} with {len(values)} values, which is nothing that texts teach")
        floors = [-_MOST] if not of and name != "plain" else []
        if of not in ("", "speed"):  # one more pass may have made a window worth less
            floors = [-_MOST if of == "gains" else 0.0, _LEAST] * (len(values) // 2)
        floors += [_LEAST if name == "plain" or of == "speed" else 0.0] * (len(values) - len(floors))
        for value, least in zip(values, floors, strict=True):
            if not (isfinite(value) and least <= value <= _MOST):
                raise ValueError(f"learned[{key}] is {value}; allowed: {least:g} to {_MOST:g}")


def recall(known: Knowledge, learned: Mapping[str, Sequence[float]]) -> None:
    """Begin with what earlier runs have learned (`check_learned` has seen it)."""
    unit = known.target_ms[0][1] / 1e3 if known.target_ms else 1.0
    for is_sampling, kind in _KINDS.items():
        pair = known.pairs[is_sampling]
        if plain := learned.get(f"{kind}.plain"):
            pair.start_plain(plain[0] * unit)
            pair.plain_tokens = plain[1]
        for head in HEAD_KINDS:
            if any(key.split(".")[:2] == [kind, head] for key in learned):
                known.head(head, is_sampling=is_sampling)
        for name, source, lengths in _sources(known, is_sampling=is_sampling):
            if of_source := learned.get(f"{kind}.{name}"):
                source.brought, draft, joining = of_source[:3]
                source.draft_seconds, source.joining_seconds = draft * unit, joining * unit
                source.joining_tokens = of_source[3]
                source.num_windows, source.pause = map(int, of_source[4:])
            if speed := learned.get(f"{kind}.{name}.speed"):
                lengths.tokens_per_second = speed[0] / unit
            for of, ratios in _ratios(lengths).items():
                values = learned.get(f"{kind}.{name}.{of}", ())
                for ratio, happened, expected in zip(ratios, values[::2], values[1::2], strict=False):
                    ratio.happened, ratio.expected = happened, expected


def _sources(known: Knowledge, *, is_sampling: bool) -> Iterator[tuple[str, SourceKnowledge, LearnedLengths]]:
    """The draft, and every head that was used, with what is known of each."""
    pair = known.pairs[is_sampling]
    yield "draft", pair, known.lengths[is_sampling]
    for kind in pair.heads:
        yield kind, *known.head(kind, is_sampling=is_sampling)


def _ratios(lengths: LearnedLengths) -> dict[str, list[Ratio]]:
    return {
        "main": [lengths.main],
        "stream": [lengths.stream],
        "gains": lengths.gains,
        "siblings": [lengths.siblings],
        "repeats": [*lengths.repeats.shares, lengths.repeats.against_draft],
    }


def _numbers(ratios: Sequence[Ratio]) -> list[float]:
    return [value for ratio in ratios for value in (ratio.happened, ratio.expected)]
