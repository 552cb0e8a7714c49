"""Answers of a comparison, kept line by line, so that a measurement that was cut off goes on where it was.

Owns: the file, and which answers it holds. Does not own: what is measured (`compare.py`, `users.py`).
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

Answers = dict[str, dict[str, list[dict[str, Any]]]]
"""By contestant and prompt, a list with an answer for each repeat."""


class Journal:
    """A file whose first line says what is measured, and each other one an answer; in memory alone without a path."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Read what is there.

        Args:
            path: the file; it is made where it is missing.
            settings: what must be the same for answers to be put together.

        Raises:
            SystemExit: the file was measured otherwise.
        """
        self._path = path
        self.answers: Answers = {}
        wanted = json.loads(json.dumps(settings))
        if path is None:
            return
        if not path.is_file():
            path.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
            return
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        differing = {name for name, value in json.loads(head).items() if wanted.get(name) != value}
        differing |= wanted.keys() - json.loads(head).keys()
        if differing:
            raise SystemExit(f"{path} was measured with other settings: {', '.join(sorted(differing))}")
        for line in lines:
            with suppress(json.JSONDecodeError):  # the last one, where the run was killed while it wrote
                found = json.loads(line)
                self._keep(found["contestant"], found["prompt"], found["answer"])

    def of(self, contestant: str, prompt: str) -> list[dict[str, Any]]:
        """The answers so far."""
        return self.answers.get(contestant, {}).get(prompt, [])

    def add(self, contestant: str, prompt: str, answer: dict[str, Any]) -> None:
        """Keep one more."""
        self._keep(contestant, prompt, answer)
        if self._path is not None:
            line = json.dumps({"contestant": contestant, "prompt": prompt, "answer": answer})
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")

    def _keep(self, contestant: str, prompt: str, answer: dict[str, Any]) -> None:
        self.answers.setdefault(contestant, {}).setdefault(prompt, []).append(answer)
