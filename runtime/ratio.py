"""A running ratio that starts from a guess and follows what happens."""

_MEMORY, _PRIOR = 0.98, 5.0


class Ratio:
    """How much of something came true, over how much was expected."""

    def __init__(self, first: float = 1.0) -> None:
        self._happened, self._expected = first * _PRIOR, _PRIOR

    def observe(self, happened: float, expected: float) -> None:
        """Learn from one case."""
        self._happened = _MEMORY * self._happened + happened
        self._expected = _MEMORY * self._expected + expected

    @property
    def value(self) -> float:
        """1 where expectations are right."""
        return self._happened / self._expected
