"""A handle by which a caller stops requests that it has started."""

import threading
from typing import Any, Self


class CancelToken:
    """Stops every request that was given it (`GenerationConfig.cancel`), from any thread, within one step of each."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Stop them: each raises `Cancelled`, and so does one that is given this token later."""
        self._event.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a request's settings is stopped by the same token."""
        return self
