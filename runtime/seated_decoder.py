"""A request's decoder on caches that it shares, in turns, with the other requests of its session."""

from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.step import Decoder, InFlight, Outcome
from mirrorsd.runtime.engine import Seat
from mirrorsd.runtime.turns import Turns


class SeatedDecoder:
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

    def start(self) -> InFlight:
        """See `Decoder.start`."""
        try:
            self._turns.take(self)
            return self._begin()[1]
        finally:
            self._turns.pause(self)

    def step(self, inflight: InFlight) -> Outcome:
        """See `Decoder.step`."""
        try:
            is_unchanged = self._turns.take(self)
            decoder = self._decoder
            if decoder is None or not is_unchanged:
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
        self._turns.retire(self)

    def leave(self) -> None:
        """See `TurnTaker.leave`."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()

    def raise_if_unwanted(self) -> None:
        """See `TurnTaker.raise_if_unwanted`."""
        self.request.raise_if_cancelled()

    def _begin(self) -> tuple[Decoder, InFlight]:
        decoder = self._decoder = self._seat.decoder(self.request, self.request.config.method)
        self.name = decoder.name
        return decoder, decoder.start()
