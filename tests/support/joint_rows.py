"""Rows of several sessions in one pass, compared with those of passes alone: logits and caches, bit by bit."""

from typing import Any

import numpy as np

from mirrorsd.runtime.backends.onnxruntime.batch import OnnxBatch
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger, TargetPass


def count_different(
    model: OnnxTargetModel, batch: OnnxBatch, *, num_passes: int = 12, seed: int = 0, first: int = 0
) -> list[int]:
    """`[different, compared]`: rows behind 0, or `first` to 33 more tokens of whoever is in a pass: one, or several."""
    random = np.random.default_rng(seed)
    sessions = [model.new_session() for _ in range(batch.num_slots + 1)]  # one more than there are slots
    texts = random.integers(0, model.entry.shape.vocab_size, (len(sessions), first + 60))
    pasts = random.integers(first, first + 34, len(sessions))
    pasts[0] = 0
    for session, text, past in zip(sessions, texts, pasts, strict=True):
        if past:
            session.prefill(text[:past], 0, ledger=Ledger())
    counts = [0, 0]
    for _ in range(num_passes):
        present = random.permutation(len(sessions))[: random.integers(1, batch.num_slots + 1)]
        windows = {one: texts[one][pasts[one] :][: random.choice((1, 1, 1, random.integers(2, 9)))] for one in present}
        asked: list[TargetPass] = []
        together = []
        for one in present:
            own = TargetPass(
                session=sessions[one],
                tokens=windows[one],
                start=int(pasts[one]),
                ledger=Ledger(),
                with_logits=bool(one % 3) or None,
            )
            if batch.takes(own, asked):
                asked.append(own)
                together.append(one)
        outputs = batch.run(asked)
        found = {
            one: [output.logits, *sessions[one].read_cache(int(pasts[one]) + len(windows[one])).rows]
            for one, output in zip(together, outputs, strict=True)
        }
        for one in together:
            alone = _found(sessions[one], windows[one], int(pasts[one]))
            expected = alone if one % 3 else [None, *alone[1:]]
            counts[0] += not all(map(_is_same, found[one], expected))
            counts[1] += 1
            pasts[one] = min(pasts[one] + random.integers(0, len(windows[one]) + 1), first + 50)
    for session in sessions:
        session.close()
    return counts


def _is_same(one: Any, other: Any) -> bool:
    return one is other is None or (one is not None and other is not None and np.array_equal(one, other))


def _found(session: Any, tokens: Any, start: int) -> list[Any]:
    logits = session.logits(tokens, start)
    return [logits, *session.read_cache(start + len(tokens)).rows]
