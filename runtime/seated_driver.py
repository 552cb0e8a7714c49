"""A request's driver on caches that it shares, in turns, with the other requests of its session."""

from mirrorsd.runtime.decoding.plain import Driver, InFlight, Outcome
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.engine import Seat
from mirrorsd.runtime.turns import Turns


class SeatedDriver:
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
        self._driver: Driver | None = None

    def start(self) -> InFlight:
        """See `Driver.start`."""
        try:
            self._turns.take(self)
            return self._begin()[1]
        finally:
            self._turns.pause(self)

    def step(self, inflight: InFlight) -> Outcome:
        """See `Driver.step`."""
        try:
            is_unchanged = self._turns.take(self)
            driver = self._driver
            if driver is None or not is_unchanged:
                num_reused = self.request.num_reused
                driver, inflight = self._begin()
                self.request.num_reused = num_reused
            outcome = driver.step(inflight)
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
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def raise_if_unwanted(self) -> None:
        """See `TurnTaker.raise_if_unwanted`."""
        self.request.raise_if_cancelled()

    def _begin(self) -> tuple[Driver, InFlight]:
        driver = self._driver = self._seat.driver(self.request, self.request.config.method)
        self.name = driver.name
        return driver, driver.start()
