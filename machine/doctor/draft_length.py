"""Does a loaded draft still guess what it guessed when its bundle was exported, on the same texts.

A text is the target's whatever a draft says, so that no comparison of texts sees a draft that is dead.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.graphs.draft_windows import GAMMA, num_accepted
from mirrorsd.runtime.backends.protocol import DraftSession
from mirrorsd.runtime.pipeline import MirrorPipeline

LEAST_KEPT = 0.8
"""Of the accepted length at export: another device's rounding costs a few hundredths, a broken draft nearly all."""
_FEWEST = 20
"""Accepted tokens at export, below which a share says nothing."""


class DraftLength(NamedTuple):
    """Mean accepted tokens of a window, now and at export; neither where the bundle does not say or too few were."""

    now: float | None
    at_export: float | None
    words: str

    @property
    def is_fine(self) -> bool:
        """Whether nothing speaks against the draft."""
        return self.now is None or self.at_export is None or self.now >= LEAST_KEPT * self.at_export


def measure_draft(pipe: MirrorPipeline) -> DraftLength:
    """Let the pipeline's draft guess along the texts that its bundle was measured on, on the draft's own device.

    Raises:
        DeviceError: the draft fails.
    """
    expected = pipe.manifest.accepted_length
    if expected is None:
        return DraftLength(None, None, "the bundle does not say how good its draft was: export it again")
    if expected.accepted * expected.num_windows < _FEWEST:
        return DraftLength(None, None, "the draft guessed too little at its export to tell whether it works")
    worker = pipe.engine.draft_worker
    session = worker.run(pipe.engine.draft_model.new_session)
    found = [worker.run(partial(accepted_along, session, text, expected.num_prompt)) for text in expected.texts]
    worker.run(session.close)
    now = sum(found) / expected.num_windows
    found_words = f"the draft guesses {now:.2f} tokens of a window, {expected.accepted:.2f} at its export"
    length = DraftLength(now, expected.accepted, found_words)
    if length.is_fine:
        return length
    advice = (
        "texts are right and come slowly; copy the bundle again, delete what was compiled of it, or export it again"
    )
    return length._replace(words=f"{found_words}: below {LEAST_KEPT:g} of it ({advice})")


def accepted_along(session: DraftSession, text: Sequence[int], num_prompt: int) -> int:
    """Accepted tokens of the windows drafted after every token of a text behind its prompt, all together."""
    session.use_noise(None)
    for start in range(0, len(text), session.max_tips):
        chunk = list(text[start : start + session.max_tips])
        session.run([RowBlock(chunk, start, start)], [0])
        session.keep_rows(range(len(chunk)), range(start, start + len(chunk)))

    def best_after(rows: Sequence[int], num_cached: int) -> list[list[int]]:
        found: list[list[int]] = (
            session.run([RowBlock(rows, num_cached, num_cached)], range(len(rows))).ids[:, :, 0].tolist()
        )
        return found

    return sum(
        num_accepted(best_after, text[:known], text[known : known + GAMMA], session.shape.num_streams)
        for known in range(num_prompt, len(text) - 1)
    )
