"""The loop of one generation: take the session's turn, start a decoder, step, stop. Text leaves through `Chunk`s."""

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count, repeat
from threading import get_ident
from time import perf_counter
from typing import NamedTuple

from mirrorsd.devices.layouts import Layout
from mirrorsd.graphs.errors import Cancelled, ContinuationError, GenerationError
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.seat import Seat
from mirrorsd.runtime.decoding.step import Decoder, InFlight, Outcome
from mirrorsd.runtime.reporting.results import Chunk, GeneratedToken, GenerationResult
from mirrorsd.runtime.reporting.stats import summarise
from mirrorsd.runtime.turns import Turns, TurnTaker
from mirrorsd.texts.shown_text import Piece, StopWatch


class Stop(NamedTuple):
    """The end of the loop: why, and the tokens that count."""

    reason: str
    token_ids: list[int]


def run_steps(decoder: Decoder, watch: StopWatch) -> Iterator[Chunk | Stop]:
    """Step until the text is over; yields a chunk per step and one `Stop` at the end.

    Tokens that a step committed after the stopping token are dropped, and counted nowhere.
    """
    request = decoder.request
    token_ids: list[int] = []
    inflight: InFlight | None = None
    num_spans = 0
    while True:
        try:
            inflight = decoder.start() if inflight is None else inflight
            request.raise_if_cancelled()
            is_given = len(inflight.window) > 0
            outcome = decoder.step(inflight)
        except Cancelled:
            if not request.is_overdue():
                raise
            request.end_after(len(token_ids))
            last = watch.finish("deadline")
            yield Chunk(last.text, ())
            yield Stop(last.stop_reason or "deadline", token_ids)
            return
        inflight = outcome.inflight
        pieces: list[Piece] = []
        reason: str | None = None
        first = len(token_ids)
        for token in outcome.tokens:
            token_ids.append(token)
            pieces.append(watch.push(token))
            reason = pieces[-1].stop_reason
            if reason is not None:
                break
        if reason is None and request.num_tokens >= request.max_tokens:
            pieces.append(watch.finish(_limit_reason(request)))
            reason = pieces[-1].stop_reason
        labelled = _label(outcome, token_ids[first:], request, first, is_given=is_given)
        tokens = _with_texts(labelled, pieces)
        if reason is not None:
            request.end_after(len(token_ids))
            _check_all_replayed(request, reason)
        spans = tuple(request.ledger.spans[num_spans:])
        num_spans += len(spans)
        yield Chunk("".join(piece.text for piece in pieces), tokens, spans=spans)
        if reason is not None:
            yield Stop(reason, token_ids)
            return


def _check_all_replayed(request: Request, reason: str) -> None:
    """Refuse to end before the ids that the text was to go on from."""
    if request.num_to_replay:
        place = request.num_new
        raise ContinuationError.of(place, f"{request.config.continue_from[place]} was given, it is over ({reason})")


def _limit_reason(request: Request) -> str:
    return "length" if request.num_new >= request.config.max_new_tokens else "context"


def _label(
    outcome: Outcome, token_ids: list[int], request: Request, first: int, *, is_given: bool
) -> tuple[GeneratedToken, ...]:
    """Say of a step's tokens, the text's `first` and those after it, where they came from and how likely they were.

    Plain decoding that was given no window (`is_given`) and verified one has looked it up in the text; so has a step
    behind one that says so.
    """
    own = "plain" if outcome.method == "plain" else "correction"
    is_free = outcome.method == "plain" and not is_given
    is_looked_up = is_free or (len(request.steps) > 1 and request.steps[-2].next_source == "text")
    sources = ["lookup" if is_looked_up else "window"] * outcome.num_accepted + [own]
    places = count(request.num_prompt + first)
    logprobs = map(request.chooser.take_logprob, places) if request.config.logprobs else repeat(None)
    return tuple(
        GeneratedToken(token, source, logprob=logprob)
        for token, source, logprob in zip(token_ids, sources, logprobs, strict=False)
    )


def _with_texts(tokens: tuple[GeneratedToken, ...], pieces: list[Piece]) -> tuple[GeneratedToken, ...]:
    """Give each token what became certain with it; the last one also what was held back until the end."""
    last = len(tokens) - 1
    texts = [*(piece.text for piece in pieces[:last]), "".join(piece.text for piece in pieces[last:])]
    return tuple(
        token._replace(text=text, num_decoded=piece.num_decoded)
        for token, text, piece in zip(tokens, texts, pieces, strict=False)
    )


class ChunkStream(Iterator[Chunk]):
    """A text's chunks, for one reader at a time; closing it, from any thread, stops the text."""

    def __init__(self, chunks: Generator[Chunk, None, None], cancel: Callable[[], None]) -> None:
        self._chunks, self._cancel = chunks, cancel
        self._reader = 0

    def __next__(self) -> Chunk:
        """The next chunk.

        Raises:
            GenerationError: another thread waits for it, or the call that a signal handler has interrupted.
            Cancelled: the text was stopped; and what `MirrorSession.generate` raises.
        """
        reader, self._reader = self._reader, self._reader or get_ident()
        try:
            return next(self._chunks)
        except ValueError as error:
            if not _is_of_generator(error):
                raise
            who = "A call that this one interrupts" if reader == get_ident() else "Another thread"
            raise GenerationError(f"{who} is reading this stream: one thread at a time may do that.") from None
        finally:
            self._reader = reader

    def close(self) -> None:
        """Stop the text; one that is being read by another thread ends there with `Cancelled`, within a step."""
        try:
            self._chunks.close()
        except ValueError as error:
            if not _is_of_generator(error):
                raise
            self._cancel()


def _is_of_generator(error: ValueError) -> bool:
    """Whether Python says it of a generator that is at work, and not something within the generator."""
    return str(error) == "generator already executing"


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


def result_of(
    place: SeatedDecoder,
    chunks: Sequence[Chunk],
    stop_reason: str,
    started: float,
    layout: Layout,
    plain_tokens_per_second: float | None,
) -> GenerationResult:
    """What became of a text that `started` then and ends now."""
    request = place.request
    tokens = [token for chunk in chunks for token in chunk.tokens]
    failure = place.draft_failure
    return GenerationResult(
        text="".join(chunk.text for chunk in chunks),
        prompt_ids=request.tokens[: request.num_prompt].tolist(),
        token_ids=[token.id for token in tokens],
        stop_reason=stop_reason,
        method=place.name,
        device_map=layout.device_map.name,
        layout=layout.name,
        seed=request.config.seed,
        stats=summarise(
            request,
            started,
            perf_counter(),
            [f"The draft failed: {failure}."] if failure else [],
            stop_reason=stop_reason,
            plain_tokens_per_second=plain_tokens_per_second,
        ),
        spans=tuple(request.ledger.spans),
        steps=tuple(request.steps),
        logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
        tokens=tuple(tokens),
        step_texts=tuple(chunk.text for chunk in chunks),
    )
