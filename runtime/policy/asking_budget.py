"""How often `auto` may ask the draft for a window on the side: that is paid out of a small share of the text.

On a pair whose target takes a millisecond a token, bringing the draft up to the text and drafting costs five of them;
on a large target, where the draft has a device of its own, nothing. So the cost is measured, and asking waits until as
much has been put aside.
"""

_SHARE = 0.015
"""What every token decoded plainly puts aside, in plain tokens' time."""
_FIRST = 2.0
"""What a text begins with."""
_COST_MEMORY = 0.7


class AskingBudget:
    """In plain tokens' time: what one window on the side costs, and what has been put aside for the next.

    Attributes:
        cost: the running mean; 0 until measured.
        aside: may be below 0, after a window that cost more than there was.
    """

    def __init__(self) -> None:
        self.cost = 0.0
        self.aside = _FIRST
        self._spent = 0.0

    @property
    def is_enough(self) -> bool:
        """Whether the next window can be paid."""
        return self.aside >= self.cost

    def expect(self, cost: float) -> None:
        """Begin with a window on the side that will cost so much, and nothing aside: plain decoding is the fastest."""
        self.cost, self.aside = max(cost, 0.0), 0.0

    def begin_text(self) -> None:
        """A new text may be asked about sooner than the last one again."""
        self.aside = max(self.aside, _FIRST)

    def put_aside(self, num_tokens: int) -> None:
        """Earn from tokens that were decoded plainly; no more is kept than a window or two cost."""
        self.aside = min(self.aside + _SHARE * num_tokens, max(_FIRST, 2 * self.cost))

    def pay(self, lost_tokens: float) -> None:
        """A step beside which the draft worked has taken so many plain tokens' time too long."""
        self._spent += lost_tokens
        self.aside -= lost_tokens

    def settle(self) -> None:
        """The window is there: learn what it has cost."""
        spent = max(self._spent, 0.0)
        self.cost = _COST_MEMORY * self.cost + (1 - _COST_MEMORY) * spent if self.cost else spent
        self._spent = 0.0
