"""One request: its text, its limits, its randomness, the record of its steps, and which guesses of a window it accepts.

That is a walk along the target's own choices.
"""

import threading
from collections.abc import Callable, Sequence
from math import inf, isfinite
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import Cancelled, ContextLengthError, GenerationError
from mirrorsd.runtime.backends.protocol import MOST_SEATED
from mirrorsd.runtime.draft.tree import RepeatedText
from mirrorsd.runtime.ledger import ALONE, Joint, Ledger
from mirrorsd.runtime.policy.siblings import Siblings
from mirrorsd.runtime.policy.windows import RepeatChances, WindowLength
from mirrorsd.runtime.sampling.chooser import Choice, Mask, TokenChooser, no_finite_logits
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig

REPLAY = "replay"
"""What steps over ids that the text goes on from are called."""


class StepRecord(NamedTuple):
    """One step: when (seconds of `perf_counter`), how long its window was, how much of it was right.

    `next_source` says where the next window came from: `early`, `exit` (a branch was ready), `late` (a branch was being
    finished), `fresh` (drafted while the target waited), `text` (what the text had said before), `none` (no window was
    wanted), `forced` (the only way on, by the form that the text shall have).
    `method` ran the step (`replay`: over ids that the text goes on from), and `own_seconds` are those in which devices
    did not work for other requests. `num_siblings` guesses stood beside the window; `num_aside` of them are among those
    that were right.
    """

    started: float
    ended: float
    num_window: int
    num_accepted: int
    next_source: str
    method: str
    own_seconds: float
    num_siblings: int = 0
    num_aside: int = 0

    @property
    def is_replay(self) -> bool:
        """Whether its window was given as what the text goes on from, so that it says nothing of how windows fare."""
        return self.method == REPLAY


class _Text:
    """Prompt and committed tokens, in one array.

    Attributes:
        ids: the tokens, and place for more.
        num_prompt: tokens of the prompt.
        num_tokens: those and the committed ones.
        most: how long it may become.
    """

    def __init__(self, prompt: Sequence[int], most: int, room: int) -> None:
        """Begin with the prompt; `room` tokens, those of windows included, are the most that is ever asked for."""
        self.num_prompt = self.num_tokens = len(prompt)
        self.most = most
        self.ids = np.zeros(room, dtype=np.int64)
        self.ids[: len(prompt)] = prompt

    def write(self, tokens: Sequence[int] | NDArray[np.int64]) -> int:
        """Write tokens behind the committed ones; where they end."""
        stop = self.num_tokens + len(tokens)
        self.ids[self.num_tokens : stop] = tokens
        return stop


class _Wish:
    """How long a request is wanted: until its caller says otherwise, in either of two ways, or its time is over."""

    def __init__(self, config: GenerationConfig, cancel: threading.Event) -> None:
        self._cancel, self._token = cancel, config.cancel
        self._until = inf if config.deadline_s is None else perf_counter() + config.deadline_s

    def cancel(self) -> None:
        self._cancel.set()

    def is_cancelled(self) -> bool:
        """Whether its caller has said so."""
        return self._cancel.is_set() or (self._token is not None and self._token.is_cancelled)

    def is_over(self) -> bool:
        """Whether it has, or its time is over."""
        return perf_counter() > self._until or self.is_cancelled()


class Request:
    """State of one generation. The scheduler's thread owns it.

    Attributes:
        num_reused: prompt tokens that were cached from an earlier request.
        windows: what cuts them; None leaves them as long as they come.
        joint: the last pass.
        repeats: what the text, and its prediction if there is one, has said before; None where nobody asks.
        near_ties: absolute positions of committed tokens whose runner-up was closer than the near-tie gap.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        speculation: SpeculationConfig,
        context: int,
        cancel: threading.Event,
        constraint: Mask | None = None,
    ) -> None:
        """Take what is asked for; `constraint` says what the text may be, None: anything."""
        check_prompt_fits(len(prompt), context)
        check_continuation_fits(len(prompt), len(config.continue_from), context)
        self.config, self.speculation = config, speculation
        self.chooser = TokenChooser(config, len(prompt), constraint)
        self.ledger = Ledger()
        self.num_reused = 0
        self.windows: WindowLength | None = None
        self.joint = ALONE
        self.repeats: RepeatedText | None = None
        self.steps: list[StepRecord] = []
        self.near_ties: list[int] = []
        most = min(context, len(prompt) + config.max_new_tokens)
        self._text, self._wish = _Text(prompt, most, context + speculation.gamma + 1), _Wish(config, cancel)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Prompt and committed tokens."""
        text = self._text
        return text.ids[: text.num_tokens]

    @property
    def num_tokens(self) -> int:
        """How many those are."""
        return self._text.num_tokens

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self._text.num_prompt

    @property
    def max_tokens(self) -> int:
        """How many its prompt and text may be."""
        return self._text.most

    def look_up(self, chances: RepeatChances) -> None:
        """Look up from now on what the text has said before; the prediction of it stands before the prompt."""
        self.repeats = RepeatedText(chances, [*self.config.prediction, *self.tokens.tolist()])

    @property
    def num_new(self) -> int:
        """Committed tokens after the prompt."""
        return self._text.num_tokens - self._text.num_prompt

    @property
    def num_to_replay(self) -> int:
        """Tokens of `continue_from` that are not committed yet."""
        return max(0, len(self.config.continue_from) - self.num_new)

    def text_with(self, window: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Committed tokens followed by the window."""
        stop = self._text.write(window)
        return self._text.ids[:stop]

    def commit(self, tokens: Sequence[int], gaps: Sequence[float], near_tie_gap: float) -> None:
        """Append what a step decided; `gaps` are the distances to the runners-up.

        The step is noted at once, as far as it is known, so that every token of the text has its record whatever ends
        the step before `record`.
        """
        start, now = self._text.num_tokens, perf_counter()
        num_accepted = len(tokens) - 1
        self.steps.append(StepRecord(now, now, num_accepted, num_accepted, "none", str(self.config.method), 0.0))
        self._text.num_tokens = self._text.write(tokens)
        if self.repeats is not None:
            self.repeats.follow(tokens)
        self.near_ties += [start + i for i, gap in enumerate(gaps) if gap < near_tie_gap]

    def end_after(self, num_new: int) -> None:
        """Keep the first `num_new` new tokens: what the last step committed behind the stopping token never was text.

        A step of which nothing is kept, as one that was cancelled before its tokens were told, was none. A last step of
        three accepted tokens and a correction, whose second token ends the text, has accepted two:

        >>> request = Request([5], GenerationConfig(), SpeculationConfig(), 99, threading.Event())
        >>> request.commit([6, 7, 8, 9], [1.0, 1.0, 0.0, 1.0], 0.1)
        >>> request.record(StepRecord(0.0, 1.0, 4, 3, "fresh", "serial", 1.0))
        >>> request.end_after(2)
        >>> request.num_new, request.steps[-1].num_accepted, request.near_ties
        (2, 2, [])
        """
        num_dropped = self.num_new - num_new
        if num_dropped > 0:
            last = self.steps.pop()
            if num_dropped <= last.num_accepted:
                num_accepted = last.num_accepted + 1 - num_dropped
                num_aside = max(last.num_aside + 1 - num_dropped, 0)
                self.steps.append(last._replace(num_accepted=num_accepted, num_aside=num_aside))
            self._text.num_tokens -= num_dropped
            self.near_ties = [position for position in self.near_ties if position < self.num_tokens]

    @property
    def num_windows(self) -> int | None:
        """Steps that verified one; None where none was wanted, or the text was over before there could be one."""
        return None if self.windows is None or len(self.steps) <= 2 else sum(step.num_window > 0 for step in self.steps)

    def window_limit(self, most: int | None = None) -> int:
        """Window tokens that can still be useful, at most `most` (`gamma`): a step commits one more than it accepts.

        In company a longer one would wait behind others' prompts, or they behind it.
        """
        text, most = self._text, self.speculation.gamma if most is None else most
        most = min(most, MOST_SEATED - 1, self.joint.most_guesses) if self.joint.num_beside else most
        return max(0, min(most, text.most - text.num_tokens - 1))

    def in_company_of(self, joint: Joint) -> None:
        """Its last pass, whose company will probably share the next."""
        self.joint = joint
        if self.windows is not None:
            self.windows.joint = joint

    def record(self, step: StepRecord) -> None:
        """Note all there is to know of the step that was committed last; it is over."""
        self.steps[-1] = step

    def cancel(self) -> None:
        """Ask it to stop, from any thread."""
        self._wish.cancel()

    def is_overdue(self) -> bool:
        """Whether the request's time is over, and nobody has cancelled it."""
        return self._wish.is_over() and not self._wish.is_cancelled()

    def is_cancelled(self) -> bool:
        """Whether it is to stop: the caller asked for it, or its time is over."""
        return self._wish.is_over()

    def raise_if_cancelled(self) -> None:
        """Raise `Cancelled` if it is to stop."""
        if self.is_cancelled():
            raise Cancelled(f"Cancelled after {self.num_new} new tokens.")


def check_prompt_fits(num_prompt: int, context: int) -> None:
    """Refuse an empty prompt, and one that leaves no room for a single new token.

    Raises:
        GenerationError: the prompt has no token.
        ContextLengthError: the prompt is as long as the context or longer.
    """
    if num_prompt == 0:
        raise GenerationError("The prompt is empty: give at least one token of text, or a message.")
    if num_prompt >= context:
        raise ContextLengthError.of(context, f"the prompt has {num_prompt}")


def check_continuation_fits(num_prompt: int, num_continued: int, context: int) -> None:
    """Refuse ids to go on from that no run of this prompt can have given.

    Raises:
        ContextLengthError: prompt and ids are longer than the context.
    """
    if num_prompt + num_continued > context:
        found = f"the prompt has {num_prompt} and continue_from {num_continued}"
        raise ContextLengthError.of(context, found)


ChooseRow = Callable[[int, Sequence[int]], Choice]
"""The target's choice behind a row, and the guesses that lead there from the head token on."""


class Acceptance(NamedTuple):
    """`num_accepted` leading window tokens equal the target's choices; `next_token` is the correction or bonus.

    `aside` are siblings that were right behind these, which stand in `rows_aside`, counted from the head token's row.
    """

    num_accepted: int
    next_token: int
    gaps: tuple[float, ...]
    aside: tuple[int, ...] = ()
    rows_aside: tuple[int, ...] = ()

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens behind the accepted part of the window."""
        return (*self.aside, self.next_token)

    @property
    def num_right(self) -> int:
        """Guesses that were right."""
        return self.num_accepted + len(self.aside)


def graph_choice(token: int, gap: float, position: int) -> Choice:
    """The target's own best token, as its graph found it.

    Raises:
        DeviceError: the gap to the runner-up is no finite number, so that the logits were none either.
    """
    if not isfinite(gap):
        raise no_finite_logits(position)
    return Choice(token, gap)


def accept_window(window: NDArray[np.int64], choose_row: Callable[[int], Choice]) -> Acceptance:
    """Verify a window against the target, row by row, stopping at the first difference.

    Row `i` predicts what follows the head token and `i` window tokens, so its choice is compared with `window[i]`.
    `choose_row(i)` is called for rows `0 .. num_accepted` only: later rows saw a text that is not the target's.

    With window `[7, 8, 9]` and target choices `[7, 8, 5, ...]` two tokens are accepted and 5 is the correction:

    >>> choices = [7, 8, 5, 1]
    >>> accept_window(np.array([7, 8, 9]), lambda i: Choice(choices[i], 1.0))[:2]
    (2, 5)

    With choices `[7, 8, 9, 4]` all three are accepted and 4 is the bonus:

    >>> choices = [7, 8, 9, 4]
    >>> accept_window(np.array([7, 8, 9]), lambda i: Choice(choices[i], 1.0))[:2]
    (3, 4)
    """
    gaps = []
    for row, token in enumerate((*window.tolist(), None)):
        choice = choose_row(row)
        gaps.append(choice.gap)
        if choice.token != token:
            return Acceptance(row, choice.token, tuple(gaps))
    raise AssertionError("unreachable: no choice equals the None after the window")


def accept_tree(window: NDArray[np.int64], siblings: Siblings, choose: ChooseRow) -> Acceptance:
    """As `accept_window`, with siblings: the target's choice behind a row picks the row that follows, if there is one.

    `choose(row, path)` is asked for rows of the text alone; `path` are the guesses that lead there. Row 0 is the head
    token's, the window's rows follow, then the siblings'.

    Window `[7, 8]` has 5 beside its 8. The target says 7, then 5, and 4 behind that, in row 3:

    >>> choices = [7, 5, 0, 4]
    >>> accept_tree(np.array([7, 8]), Siblings(np.array([5]), np.array([1])), lambda row, _: Choice(choices[row], 1.0))
    Acceptance(num_accepted=1, next_token=4, gaps=(1.0, 1.0, 1.0), aside=(5,), rows_aside=(3,))
    """
    rows = {(row, token): row + 1 for row, token in enumerate(window.tolist())}
    beside = zip(siblings.parents.tolist(), siblings.tokens.tolist(), strict=True)
    rows |= {place: len(window) + 1 + number for number, place in enumerate(beside)}
    path, taken, gaps = list[int](), list[int](), list[float]()
    row, num_accepted = 0, 0
    while True:
        choice = choose(row, path)
        gaps.append(choice.gap)
        following = rows.get((row, choice.token))
        if following is None:
            aside = tuple(path[num_accepted:]), tuple(taken[num_accepted:])
            return Acceptance(num_accepted, choice.token, tuple(gaps), *aside)
        row = following
        path.append(choice.token)
        taken.append(row)
        num_accepted += row <= len(window)
