"""A session's seat: its caches on both devices, and the decoders that use them.

Owns, too, the one assembly of a request's parts to a decoder, for real devices, for simulated ones and for tests.
"""

import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

from mirrorsd.devices import freed_memory
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.decoding.auto import AutoSource
from mirrorsd.runtime.decoding.head import HeadArm, HeadLink, HeadSource
from mirrorsd.runtime.decoding.links import DraftLink, TargetLink
from mirrorsd.runtime.decoding.lookup import LookupSource, Repeats
from mirrorsd.runtime.decoding.mirror import MirrorSource
from mirrorsd.runtime.decoding.protocol import Decoder, InFlight, Outcome
from mirrorsd.runtime.decoding.replay import ReplaySource
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.step import FreeRows, SerialSource, StepDecoder
from mirrorsd.runtime.draft.drafter import Drafter
from mirrorsd.runtime.draft.tree import DraftChain
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.runtime.policy.roots import RootPlanner
from mirrorsd.runtime.policy.siblings import SiblingChooser
from mirrorsd.runtime.policy.windows import WindowLength
from mirrorsd.runtime.turns import Turns, TurnTaker
from mirrorsd.texts.config import HEAD_METHODS, SpeculationConfig


class Seat:
    """One session's caches on both devices, and the decoders that use them. One request at a time.

    Attributes:
        target: the line to the target, for its cache.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._target_session = engine.target_worker.run(engine.target_model.new_session)
        self._draft_session = engine.draft_worker.run(engine.draft_model.new_session)
        self.target = TargetLink(self._target_session, engine.target_worker)
        self._drafter = Drafter(self._draft_session)
        engine.seats.add(self)
        self._link: DraftLink | None = None
        self._heads: dict[str, HeadLink] = {}
        self._asked: DraftLink | HeadLink | None = None

    @property
    def context(self) -> int:
        """Most tokens of prompt and new text together."""
        return min(self._target_session.context, self._draft_session.capacity)

    @property
    def draft_failure(self) -> str | None:
        """Why the draft, or the head, was given up in the current request."""
        return self._asked.failure if self._asked else None

    @property
    def heads(self) -> Collection[str]:
        """The kinds of heads that can run here."""
        return self.target.heads

    def decoder(self, request: Request, method: str) -> Decoder:
        """The decoder for a request; plain where the draft cannot be used, and first of all what replays its text."""
        self._asked = None
        if request.num_to_replay:
            return StepDecoder(request, self.target, ReplaySource(request), ReplaySource.name)
        if method in HEAD_METHODS:
            self._asked = head = self._head_link(method)
            return head_decoder(request, self.target, head, self._engine.known)
        if method == "lookup":
            return lookup_decoder(request, self.target, self._engine.known)
        if method == "plain" or not self._is_draft_ready():
            return plain_decoder(request, self.target)
        self._asked = self._link = link = DraftLink(
            self._drafter,
            self._engine.draft_worker,
            request.speculation.draft_deadline_s,
            request.ledger,
            takes_turns=self._engine.takes_turns,
            is_cancelled=request.is_cancelled,
        )
        num_slots = min(self._draft_session.capacity, request.max_tokens + _scratch_slots(request.speculation))
        link.prepare(num_slots, self._engine.preparing_worker)
        heads = [self._head_link(kind) for kind in self.heads] if method == "auto" else []
        return decoder_with(request, method, self.target, link, self._engine.known, heads=heads)

    def _head_link(self, kind: str) -> HeadLink:
        """A head's link; one that failed before starts over."""
        if kind not in self._heads or self._heads[kind].failure is not None:
            self._heads[kind] = HeadLink(kind, self.target)
        return self._heads[kind]

    def _is_draft_ready(self) -> bool:
        """Whether the draft answers; one that failed but is not hung starts over with an empty cache."""
        if self._link is None or self._link.failure is None:
            return True
        if self._link.is_busy():
            self._asked = self._link
            warnings.warn(
                f"The draft is still hung ({self._link.failure}); this text is decoded plainly.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._drafter.forget()
        return True

    def follow(self, other: "Seat", most: int | None) -> bool:
        """Take over what target and draft have cached of another conversation, at most so many tokens.

        The draft does so once it is done with what it is at, unless the other one's has failed.

        Returns:
            Whether that can be done.
        """
        can_follow = self.target.follow(other.target, most)
        if can_follow and not (other._link and other._link.failure):
            with suppress(DeviceError):  # it is closed or hung, which the next request finds out
                chains = self._drafter.chain, other._drafter.chain
                self._engine.draft_worker.submit(partial(DraftChain.follow, *chains, most), self)
        return can_follow

    def forget(self) -> None:
        """Let go of what target, heads and draft have cached; the draft once it is done with what it is at."""
        self.target.forget()
        self._heads.clear()
        with suppress(DeviceError):  # it is closed or hung, which the next request finds out
            self._engine.draft_worker.submit(self._drafter.forget, self)

    def check_reachable(self) -> None:
        """Refuse a step that could not run here.

        Raises:
            GenerationError: the devices are in another process, or at work on this very thread, which is interrupted.
        """
        if self.is_forked:
            self._engine.check_usable()
        self._engine.target_worker.check_reachable()
        self._engine.draft_worker.check_reachable()

    @property
    def is_forked(self) -> bool:
        """Whether the devices are another process's, of which this one is a fork."""
        return self._engine.is_forked

    def terminate(self) -> None:
        """Ask the target's device to end the pass that is running for this session, from any thread."""
        self.target.terminate()

    def close(self) -> None:
        """Release the caches, on their own workers and after what is still running there; does not wait."""
        self.target.forget()  # nobody follows it any more
        self._engine.target_worker.leave(self._target_session.close, self)
        self._engine.draft_worker.leave(self._draft_session.close, self)
        if freed_memory.is_due():
            self._engine.preparing_worker.leave(freed_memory.give_back)


def _scratch_slots(speculation: SpeculationConfig) -> int:
    """Most cache slots past the text: the window, and a whole branch for every root.

    A plan may be made twice in a step, before and after the exit has spoken: branches of the first keep their slots.
    """
    per_row = speculation.kappa * (1 + speculation.gamma)
    num_roots = 2 * speculation.roots if speculation.allocation == "global" else per_row
    return (1 + speculation.gamma) * (1 + num_roots)


def plain_decoder(request: Request, target: TargetLink) -> StepDecoder:
    """Decodes without a draft."""
    return StepDecoder(request, target, FreeRows(request), "plain")


def lookup_decoder(request: Request, target: TargetLink, known: Knowledge) -> StepDecoder:
    """Decodes with windows from the text itself."""
    is_sampling = request.chooser.is_sampling
    request.windows = known.windows(request.speculation, is_sampling=is_sampling)
    request.look_up(known.lengths[is_sampling].repeats)
    return StepDecoder(request, target, LookupSource(request, target.row_group), "lookup")


def head_decoder(request: Request, target: TargetLink, head: HeadLink, known: Knowledge) -> StepDecoder:
    """Decodes with windows from a head."""
    source = _head_source(request, target, head, known)
    request.windows = source.windows
    request.chooser.be_heard()
    return StepDecoder(request, target, source, head.kind)


def decoder_with(
    request: Request,
    method: str,
    target: TargetLink,
    draft: DraftLink,
    known: Knowledge,
    heads: Sequence[HeadLink] = (),
) -> StepDecoder:
    """Decodes with a draft by `serial`, `mirror` or `auto`; `heads` may guess beside it, by `auto`."""
    if method == "plain":
        return plain_decoder(request, target)
    is_sampling = request.chooser.is_sampling
    request.windows = known.windows(request.speculation, is_sampling=is_sampling)
    if request.speculation.repeats:
        request.look_up(known.lengths[is_sampling].repeats)
    passes = request.speculation.passes if draft.drafter.session.shape.num_streams else request.speculation.gamma
    serial = SerialSource(request, draft, passes, _siblings(request, target, request.windows))
    planner = RootPlanner(request.speculation, request.chooser, known.root_scores)
    mirror = MirrorSource(serial, target, planner)
    if method == "serial":
        return StepDecoder(request, target, serial, method)
    if method == "mirror":
        return StepDecoder(request, target, mirror, method)
    pair = known.pairs[is_sampling]
    is_overlapping = pair.method == "mirror" or (not pair.method and not draft.takes_turns)
    sources = [_head_source(request, target, head, known) for head in heads]
    arms = [HeadArm(source, known.head(source.name, is_sampling=is_sampling)) for source in sources]
    drafting = mirror if is_overlapping else serial
    source = AutoSource(serial, drafting, Repeats(request, target.row_group), pair, arms)
    return StepDecoder(request, target, source, method)


def _siblings(request: Request, target: TargetLink, windows: WindowLength | None) -> SiblingChooser | None:
    """What chooses guesses beside windows; None where they are not wanted, or cannot be weighed or run."""
    most = request.speculation.siblings
    if not most or windows is None or not target.takes_trees:
        return None
    return SiblingChooser(request.chooser, windows, most)


def _head_source(request: Request, target: TargetLink, head: HeadLink, known: Knowledge) -> HeadSource:
    """Windows from a head, with siblings."""
    is_sampling = request.chooser.is_sampling
    windows = known.windows(request.speculation, is_sampling=is_sampling, head=head.kind)
    return HeadSource(request, head, windows, _siblings(request, target, windows))


class SeatedDecoder(Decoder, TurnTaker):
    """Takes the session's turn for every step; where another request had the caches meanwhile, it starts over.

    Starting over reads the text so far into the caches again, and changes no token.

    Attributes:
        name: the method that runs.
        draft_failure: why the draft was given up, if it was.
    """

    def __init__(self, request: Request, seat: Seat, turns: Turns) -> None:
        self.request, self.name = request, str(request.config.method)
        self.draft_failure: str | None = None
        self._seat, self._turns = seat, turns
        self._decoder: Decoder | None = None
        self._is_replaying = False

    def start(self) -> InFlight:
        self._seat.check_reachable()
        try:
            self._turns.take(self)
            return self._begin()[1]
        finally:
            self._turns.pause(self)

    def step(self, inflight: InFlight) -> Outcome:
        self._seat.check_reachable()
        try:
            is_unchanged = self._turns.take(self)
            decoder = self._decoder
            is_replayed = self._is_replaying and not self.request.num_to_replay
            if decoder is None or not is_unchanged or is_replayed:  # from here on its own method takes over
                num_reused = self.request.num_reused
                decoder, inflight = self._begin()
                self.request.num_reused = num_reused
            outcome = decoder.step(inflight)
            self.draft_failure = self.draft_failure or self._seat.draft_failure
            self._turns.check(self)
            return outcome
        finally:
            self._turns.pause(self)

    def close(self) -> None:
        """Leave nothing running that belongs to this request, and the turn to the next one."""
        if not self._seat.is_forked:
            self._turns.retire(self)

    def leave(self) -> None:
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()

    def raise_if_unwanted(self) -> None:
        self.request.raise_if_cancelled()

    def _begin(self) -> tuple[Decoder, InFlight]:
        request = self.request
        self._is_replaying = request.num_to_replay > 0
        decoder = self._decoder = self._seat.decoder(request, request.config.method)
        if not self._is_replaying:
            self.name = decoder.name
        return decoder, decoder.start()
