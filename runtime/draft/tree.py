"""What is known and guessed: what the text has said before, the chain of known tokens, and branches from roots on it.

Where a text ends as an earlier part did, that part's continuation is a guess that costs no drafting (prompt lookup
decoding, A. Saxena, 2023). The chain is committed text, head token and window. Cache slot `p` holds the token at
position `p` for every fed chain token; slots after the chain are scratch.
"""

from collections.abc import Iterable, Sequence
from itertools import count, cycle, islice
from math import isnan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.protocol import DraftSession
from mirrorsd.runtime.policy.roots import Root
from mirrorsd.runtime.policy.windows import MOST_COMPARED, Ratio, RepeatChances, Share
from mirrorsd.texts.config import LONGEST_WINDOW

NO_TOKENS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
LEAST_SHARE = -20.0  # in logs: what a guess without runners-up leaves to others
_LONGEST_END = 4  # tokens of context that are looked for first; then fewer, down to one
_LEAST_CHANCE = 0.25  # that a text goes on as it did, to be worth a guess; 0.01: as many tokens a step, and slower


class Repeat(NamedTuple):
    """The text's end agrees with an earlier part of it, in `length` tokens; what followed there stands at `place`."""

    place: int
    length: int


class RepeatedText:
    """Follows one text that only grows: how it has gone on where it stood as it does now, and how often it does again.

    By what all texts have taught, and how much oftener that came true here. The scheduler's thread lets it follow; what
    it repeats may be asked from any thread. What nobody asks for (`is_watched`) is not learned: it slows short steps.
    """

    def __init__(self, chances: RepeatChances, prompt: Sequence[int]) -> None:
        """Begin with a prompt; teach `chances` what comes after it."""
        self.is_watched, self._missed = True, list[int]()
        self._chances, self._truth = chances, Ratio()
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        for token in prompt:
            self._append(token)
        self._repeat = self.find(self._tokens)

    def watch(self, *, is_wanted: bool) -> None:
        """Whether anybody asks from now on; what was missed meanwhile is made up for."""
        self.is_watched = is_wanted
        if is_wanted and self._missed:
            for token in self._missed:
                self._append(token)
            self._missed.clear()
            self._repeat = self.find(self._tokens)

    def follow(self, new: Iterable[int]) -> None:
        """The text goes on with these tokens."""
        if not self.is_watched:
            self._missed += new
            return
        for token in new:
            repeat = self._repeat
            if repeat is not None:
                is_right = self._tokens[repeat.place] == token
                self._truth.observe(float(is_right), self._chances.chance(repeat.length))
                self._chances.observe(repeat.length, is_right=is_right)
            self._append(token)
            self._repeat = self.go_on(repeat, self._tokens)

    def _append(self, token: int) -> None:
        """Note the token as what came after the last ones, one to four of them."""
        place, end = len(self._tokens), tuple(self._tokens[-_LONGEST_END:])
        self._tokens.append(token)
        for start in range(len(end)):
            self._places[end[start:]] = place

    def find(self, text: Sequence[int]) -> Repeat | None:
        """Where the longest end of `text` stood last that was followed by something; None where it never did.

        >>> RepeatedText(RepeatChances(), [5, 1, 2, 8, 6]).find([1, 2])
        Repeat(place=3, length=2)
        """
        end = tuple(text[-_LONGEST_END:])
        for first in range(len(end)):  # a loop and no generator: a round asks for a dozen ends
            place = self._places.get(end[first:])
            if place is not None:
                return Repeat(place, self._agreeing(place, text))
        return None

    def _agreeing(self, place: int, text: Sequence[int]) -> int:
        """How many tokens before `place` are those at the end of `text`."""
        tokens, length, most = self._tokens, 0, min(place, len(text), MOST_COMPARED)
        while length < most and tokens[place - 1 - length] == text[-1 - length]:
            length += 1
        return length

    def go_on(self, repeat: Repeat | None, text: Sequence[int]) -> Repeat | None:
        """What `text` repeats after its last token, `repeat` being what it did before: the same place while that lasts.

        >>> text = RepeatedText(RepeatChances(), [5, 1, 2, 8, 6])
        >>> text.go_on(Repeat(place=3, length=2), [1, 2, 8])
        Repeat(place=4, length=3)
        """
        if repeat is not None and repeat.place + 1 < len(self._tokens) and self._tokens[repeat.place] == text[-1]:
            return Repeat(repeat.place + 1, repeat.length + 1)
        return self.find(text)

    def said(self, repeat: Repeat | None) -> tuple[int, float] | None:
        """What came there, and the chance that it does again; None where it hardly will."""
        if repeat is None:
            return None
        chance = self._chances.chance(repeat.length, self._truth.value)
        return (self._tokens[repeat.place], chance) if chance > _LEAST_CHANCE else None

    def share(self, chance: float) -> float:
        """What a token of this chance counts beside what the draft thinks."""
        return self._chances.share(chance)

    def settle(self, chance: float, *, is_right: bool) -> None:
        """The draft thought otherwise than the text had `said` with this chance. Only its own thread may say so."""
        self._chances.settle(chance, is_right=is_right)

    def reach(self, count: int) -> Sequence[float]:
        """Chance of each of the next `count` tokens, and all before it, to be as they were; empty without a repeat."""
        repeat = self._repeat
        return [] if repeat is None else self._chances.reach(repeat.length, count, self._truth.value)

    def window(self, count: int) -> NDArray[np.int64]:
        """The next `count` tokens, as they were, round and round; empty where the text repeats nothing.

        >>> RepeatedText(RepeatChances(), [5, 1, 2, 8, 6, 1, 2]).window(2).tolist()
        [8, 6]
        """
        repeated = () if self._repeat is None else islice(cycle(self._tokens[self._repeat.place :]), count)
        return np.fromiter(repeated, np.int64)


class DraftChain:
    """Tokens, cache fill and next-token candidates of the chain.

    Attributes:
        num_fed: leading chain tokens whose keys and values are cached.
        num_known: known chain tokens.
    """

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.num_fed = self.num_known = self._num_noted = 0
        size, width = session.capacity + 2 * LONGEST_WINDOW, session.shape.num_candidates  # more is known than ever fed
        self._tokens = np.zeros(size, dtype=np.int64)
        self._next_ids = np.zeros((size, width), dtype=np.int64)
        self._next_logprobs = np.full((size, width), -np.inf, dtype=np.float32)

    @property
    def head(self) -> int:
        """Position of the last known token."""
        return self.num_known - 1

    def restart(self, tokens: NDArray[np.int64]) -> None:
        """Take a new text; what is cached stays cached up to the first difference."""
        self.num_fed = longest_common_prefix(self._tokens[: self.num_fed], tokens[:-1])
        self.num_known = len(tokens)
        self._tokens[: len(tokens)] = tokens
        self._next_logprobs[: self._num_noted] = -np.inf
        self._num_noted = 0
        self.session.forget_after(self.num_fed)

    def num_unread(self, tokens: NDArray[np.int64]) -> int:
        """How many of a text's tokens `restart` would leave to be fed, the head token aside."""
        return len(tokens) - 1 - longest_common_prefix(self._tokens[: self.num_fed], tokens[:-1])

    def follow(self, other: "DraftChain", most: int | None) -> None:
        """Take over the cache of another session's first tokens, at most so many; not of those that this one has, too.

        Where sessions cannot copy, nothing changes.
        """
        if not self.session.copies_rows:
            return
        tokens = other._tokens[: other.num_fed][:most]
        start = longest_common_prefix(self._tokens[: self.num_fed], tokens)
        self.forget()
        self.session.copy_rows(other.session, range(start, len(tokens)))
        self._tokens[: len(tokens)] = tokens
        self.num_fed = self.num_known = len(tokens)

    def forget(self) -> None:
        """Drop everything, after a failure that left the cache unknown."""
        self.num_fed = self.num_known = 0

    def token(self, position: int) -> int:
        """The chain token at a position."""
        return int(self._tokens[position])

    def cut(self, num_known: int) -> None:
        """Forget the tokens from position `num_known` on: a rollback by number, nothing moves."""
        self.num_known = num_known
        self.num_fed = min(self.num_fed, num_known)
        first = max(num_known - 1, 0)
        self._next_logprobs[first : self._num_noted] = -np.inf
        self._num_noted = min(self._num_noted, first)

    def append(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """Make tokens known after the last one; they are not fed yet."""
        self._tokens[self.num_known : self.num_known + len(tokens)] = tokens
        self.num_known += len(tokens)

    def block(self, stop: int) -> RowBlock:
        """Rows for the unfed tokens before position `stop`."""
        return RowBlock(self._tokens[self.num_fed : stop].tolist(), self.num_fed, self.num_fed)

    def feed(self, stop: int) -> None:
        """Cache the chain up to position `stop`, in prefill chunks."""
        while self.num_fed < stop:
            chunk_stop = min(self.num_fed + self.session.prefill_rows, stop)
            self.run([self.block(chunk_stop)], [chunk_stop - self.num_fed - 1])
            self.keep(chunk_stop)

    def keep(self, stop: int) -> None:
        """Put the leading rows of the last pass into the cache as chain rows `num_fed .. stop - 1`."""
        if stop > self.num_fed:
            self.session.keep_rows(range(stop - self.num_fed), range(self.num_fed, stop))
            self.num_fed = stop

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        """One draft pass, its answer checked.

        Raises:
            DeviceError: the device failed, or answered what no draft answers.
        """
        return _checked(self.session.run(blocks, tip_rows), len(tip_rows), self.session.shape)

    def note_candidates(
        self, position: int, ids: Iterable[NDArray[np.int64]], logprobs: Iterable[NDArray[np.float32]]
    ) -> None:
        """Remember what the draft thinks comes after each position from `position` on: `n` times `[m]`, best first."""
        for place, of_ids, of_logprobs in zip(count(position), ids, logprobs, strict=False):
            self._next_ids[place] = of_ids
            self._next_logprobs[place] = of_logprobs
            self._num_noted = max(self._num_noted, place + 1)

    def end(self, stop: int) -> list[int]:
        """The last tokens before position `stop`, as many as ends are compared by."""
        tokens: list[int] = self._tokens[max(stop - MOST_COMPARED, 0) : stop].tolist()
        return tokens

    def candidates(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What the draft thinks comes after positions `start .. stop - 1`: ids and log-probabilities `[n, m]`.

        Rows about which it knows nothing have log-probability `-inf`.
        """
        return self._next_ids[start:stop], self._next_logprobs[start:stop]


def _checked(guesses: TipGuesses, num_tips: int, shape: DraftShape) -> TipGuesses:
    """Refuse what no working draft returns, before it can reach the target.

    Raises:
        DeviceError: wrong shape, an id outside the vocabulary, or a log-probability that is not a number.
    """
    expected = (num_tips, 1 + shape.num_streams)
    if guesses.ids.shape[:2] != expected or guesses.logprobs.shape != guesses.ids.shape:
        raise DeviceError(f"The draft returned guesses of shape {guesses.ids.shape}, expected {(*expected, 'm')}.")
    # Without a sign, ids below 0 are the largest: one look finds both ends. A minimum with a NaN is one.
    if guesses.ids.size and guesses.ids.view(np.uint64).max() >= shape.vocab_size:
        raise DeviceError(f"The draft returned token ids outside 0 .. {shape.vocab_size - 1}.")
    if guesses.ids.size and isnan(guesses.logprobs[..., 0].min()):
        raise DeviceError("The draft returned log-probabilities that are not numbers.")
    return guesses


def longest_common_prefix(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """Number of leading equal tokens.

    >>> longest_common_prefix(np.array([1, 2, 3]), np.array([1, 2, 9, 9]))
    2
    """
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size]) if size else NO_TOKENS
    return int(different[0]) if len(different) else size


class BranchWindow(NamedTuple):
    """A finished or unfinished branch as the scheduler sees it: the tokens after the root, and where it came from.

    `shares` and `num_main` are those of `WindowLength.cut`, candidates those of `Branch`.
    """

    tokens: NDArray[np.int64]
    source: str
    shares: list[Share]
    num_main: int
    candidate_ids: Sequence[NDArray[np.int64]] = ()
    candidate_logprobs: Sequence[NDArray[np.float32]] = ()

    def after(self, tokens: Sequence[int]) -> "BranchWindow | None":
        """What comes after `tokens`, with which it begins; None where it says otherwise, or no more."""
        count = len(tokens)
        if count and (len(self.tokens) <= count or self.tokens[:count].tolist() != list(tokens)):
            return None
        left = self.tokens[count:], self.source, self.shares[count:], max(self.num_main - count, 0)
        return BranchWindow(*left, self.candidate_ids[count:], self.candidate_logprobs[count:])


class Branch:
    """One root and its continuation on the draft device.

    `start` is the root token's absolute position: the branch sees every chain token before it. `fed` are the tokens
    (root first) whose keys and values are in `slots`; `guesses` are the tokens predicted after them. Entry `t` of
    `candidate_ids` and `candidate_logprobs` (`[m]` each) is what the draft thinks comes after token `t` of the branch;
    entry `t` of `shares` is how sure it is of the one it chose there (see `WindowLength.cut`). `disputes`
    are, by position, tokens that the text has said where the draft thinks otherwise, and the chances of those.
    """

    __slots__ = (
        "candidate_ids",
        "candidate_logprobs",
        "disputes",
        "fed",
        "guesses",
        "root",
        "shares",
        "slots",
        "start",
    )

    def __init__(self, root: Root, start: int) -> None:
        self.root, self.start = root, start
        self.fed, self.slots = list[int](), list[int]()
        self.guesses: list[int] = [root.token]
        self.candidate_ids: list[NDArray[np.int64]] = []
        self.candidate_logprobs: list[NDArray[np.float32]] = []
        self.shares: list[Share] = []
        self.disputes: dict[int, tuple[int, float]] = {}

    @property
    def window(self) -> list[int]:
        """The tokens after the root: confirmed ones, then guesses."""
        return (self.fed + self.guesses)[1:]

    @property
    def num_window(self) -> int:
        """How many tokens there are after the root."""
        return len(self.fed) + len(self.guesses) - 1

    def published(self, gamma: int) -> BranchWindow:
        """The branch as the scheduler sees it, `gamma` tokens at most."""
        tokens = np.asarray(self.window[:gamma], dtype=np.int64)
        candidates = self.candidate_ids[:gamma], self.candidate_logprobs[:gamma]
        return BranchWindow(tokens, self.root.source, self.shares[:gamma], len(self.fed), *candidates)

    def num_confirmed(self, predicted: Sequence[Sequence[int]]) -> int:
        """How many of the fed guesses stay, by what was predicted after each: those up to the first wrong one."""
        kept = 1
        while kept < len(self.guesses) and predicted[kept - 1][0] == self.guesses[kept]:
            kept += 1
        return kept

    def disputes_after(self, num_fed: int) -> dict[int, tuple[int, float]]:
        """Those about tokens after the first `num_fed` fed ones: behind a wrong guess nothing can be settled."""
        return {place: said for place, said in self.disputes.items() if place <= self.start + num_fed}

    def absorb(self, predicted: Sequence[Sequence[int]], shares: Sequence[Sequence[Share]], tips: TipGuesses) -> int:
        """Take in a pass that was fed all current guesses; return how many of its rows to keep.

        `predicted[r][0]` is the draft's next token after fed row `r`, `predicted[r][j]` the token `j` further on, with
        `shares[r][j]`; `tips` are the candidate lists they were chosen from. A row is kept while the main guess
        before it agrees with it (Speculative Streaming, section 3.2).

        Guesses `[5, 6, 7]` were fed; the draft says 6 after 5, then 9 after 6: rows 5 and 6 stay, 9 replaces 7 and the
        streams of row 1 follow it:

        >>> branch = Branch(Root(0, 5, 1.0, "exit"), 10); branch.guesses = [5, 6, 7]
        >>> predicted = [[6, 0, 0], [9, 8, 4], [1, 0, 0]]
        >>> tips = TipGuesses(np.array(predicted)[..., None], np.zeros((3, 3, 1)))
        >>> branch.absorb(predicted, np.zeros((3, 3, 2)).tolist(), tips), branch.fed, branch.guesses
        (2, [5, 6], [9, 8, 4])
        """
        kept = self.num_confirmed(predicted)
        first, last = len(self.fed), kept - 1
        self.fed += self.guesses[:kept]
        self.disputes = self.disputes_after(len(self.fed))
        self.guesses = [*predicted[last]]
        self.candidate_ids[first:] = [*tips.ids[:kept, 0], *tips.ids[last, 1:]]
        self.candidate_logprobs[first:] = [*tips.logprobs[:kept, 0], *tips.logprobs[last, 1:]]
        self.shares[first:] = [*(row[0] for row in shares[:kept]), *shares[last][1:]]
        return kept
