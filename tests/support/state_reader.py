"""A session of a target with states, fed like speculation feeds it, and compared bit by bit with single rows."""

import numpy as np

from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger

VOCABULARY, LONGEST = 320, 300


class Reader:
    """A session that is fed pieces of one text, and compared with the text read row by row, bit by bit."""

    def __init__(self, model: OnnxTargetModel, seed: int) -> None:
        self.model, self.dice = model, np.random.default_rng(seed)
        self.text = self.dice.integers(0, VOCABULARY, LONGEST)
        alone = model.new_session()
        self.truth = np.concatenate([alone.logits(self.text[row : row + 1], row) for row in range(LONGEST)])
        self.session: OnnxTarget = model.new_session()
        self.place = 0

    def verify(self, num_rows: int) -> None:
        """A window with a wrong token somewhere, or none; some of the right rows are kept."""
        rows = self.text[self.place : self.place + num_rows].copy()
        num_right = int(self.dice.integers(1, len(rows) + 1))
        rows[num_right:] = (rows[num_right:] + 1) % VOCABULARY
        found = self.session.logits(rows, self.place)
        wanted = self.truth[self.place : self.place + num_right]
        assert np.array_equal(found[:num_right], wanted), (self.place, num_rows, num_right)
        self.place += int(self.dice.integers(1, num_right + 1))

    def prefill(self, num_rows: int) -> None:
        """Rows of a prompt."""
        self.session.prefill(self.text[self.place : self.place + num_rows], self.place, ledger=Ledger())
        self.place += num_rows

    def rewind(self) -> None:
        """Back to some place, as near to it as the session can."""
        wanted = int(self.dice.integers(self.place // 2, self.place + 1))
        found = self.session.resumable(wanted)
        assert 0 <= found <= wanted
        self.place = found

    def move(self) -> None:
        """What is kept goes into another session."""
        kept = self.session.read_cache(self.place)
        self.session = self.model.new_session()
        self.session.write_cache(kept)

    def walk(self, num_moves: int) -> None:
        """Windows with wrong rows at every place, prompts, rewinds and moves between sessions."""
        for number in range(num_moves):
            room = LONGEST - self.place
            if number % 23 == 22 or room <= 40:
                self.rewind()
            elif number % 17 == 16:
                self.prefill(int(self.dice.integers(1, 40)))
            elif number % 29 == 28:
                self.move()
            else:
                self.verify(int(self.dice.integers(1, 10)))
