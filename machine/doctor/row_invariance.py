"""Do a row's logits depend on how many rows are in its pass? Asked of the machine at hand, not of a list of kernels.

Where they do not (the target is batch-invariant), plain decoding and speculation cannot part by rounding. Exporting
sees to that for ONNX Runtime's CPU kernels; other processors and devices have others (docs/exactness.md).
"""

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import TargetSession
from mirrorsd.runtime.ledger import Ledger

__all__ = ["largest_row_difference"]

_PROMPT_ROWS = 8
_PASS_SIZES = (2, 3, 5, 8)


def largest_row_difference(
    session: TargetSession, *, num_rows: int = 64, pass_sizes: tuple[int, ...] = _PASS_SIZES
) -> float:
    """Run the same rows one by one and several at a time; return the largest difference of a logit, 0.0 for none.

    Call it on the target's thread. Takes about 120 passes of few rows; the cache is overwritten.
    """
    num_rows = min(num_rows, session.context)
    tokens = np.random.default_rng(0).integers(0, session.vocab_size, num_rows)
    one_by_one = _logits(session, tokens, 1)
    return max(float(np.abs(_logits(session, tokens, size) - one_by_one).max()) for size in pass_sizes)


def _logits(session: TargetSession, tokens: NDArray[np.int64], size: int) -> NDArray[np.float32]:
    """Logits `[S, V]` of the rows behind the first few, in passes of `size` rows."""
    session.prefill(tokens[:_PROMPT_ROWS], 0, ledger=Ledger())
    found = []
    for start in range(_PROMPT_ROWS, len(tokens), size):
        rows = tokens[start : start + size]
        logits = session.run(rows, start, with_logits=True, ledger=Ledger(), exits=()).logits
        assert logits is not None  # they were asked for
        found.append(logits.astype(np.float32))  # a copy: the next pass writes to the same memory
    return np.concatenate(found)
