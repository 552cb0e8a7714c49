"""How good a draft is, by itself: the windows that it guesses along a text, and how much of them the text goes on with.

Owns: the protocol, so that an export and whoever measures later do the same. Does not own: running a draft.
"""

from collections.abc import Callable, Sequence

GAMMA, STREAM_PASSES = 6, 2
"""Tokens of a window, and passes that a draft with streams has for one."""
BestAfter = Callable[[Sequence[int], int], list[list[int]]]
"""Of rows of ids behind so many cached ones: each row's best next token, and what its streams say of those after it."""


def num_accepted(best_after: BestAfter, known: Sequence[int], truth: Sequence[int], num_streams: int) -> int:
    """How many tokens of the window of `GAMMA` after `known`, all but the last of which are cached, are the truth's.

    Every pass feeds the last known token and the window so far, keeps what the main rows agree with, and goes on from
    there: main prediction, then streams. With s = 2: `[a, b, c]`; main rows then say `a, b, x`: `[a, b, x, y, z]`. What
    main rows have said stays, so the first of it that is wrong decides.
    """
    window: list[int] = []
    for _ in range(STREAM_PASSES if num_streams else GAMMA):
        said = best_after((known[-1], *window), len(known) - 1)
        num_agreed = 0
        while num_agreed < len(window) and window[num_agreed] == said[num_agreed][0]:
            num_agreed += 1
        window = [*window[:num_agreed], *said[num_agreed]][:GAMMA]
        if num_agreed == GAMMA or agreed(window, truth) <= num_agreed:
            break
    return agreed(window, truth)


def agreed(window: Sequence[int], truth: Sequence[int]) -> int:
    """Leading tokens that are the same.

    >>> agreed([3, 4, 5], [3, 4, 9, 5]), agreed([3, 4, 5], [3])
    (2, 1)
    """
    pairs = list(zip(window, truth, strict=False))
    return next((i for i, (ours, true) in enumerate(pairs) if ours != true), len(pairs))
