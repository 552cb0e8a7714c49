"""Stands in for the engine's own seats until they are there."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from mirrorsd.runtime import GenerationConfig, MirrorPipeline, MirrorSession


class CancelToken:
    def __init__(self) -> None:
        self.is_cancelled = False
        self.session: MirrorSession | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.session:
            self.session.cancel()


class Seats:
    def __init__(self, pipe: MirrorPipeline, count: int) -> None:
        self.num_seats = count
        self._free = [(pipe.session(), []) for _ in range(count)]
        self._lock = threading.Lock()
        self.bytes_per_seat = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @contextmanager
    def take(self, token_ids: Sequence[int], timeout_s: float | None = None) -> Iterator[MirrorSession]:
        with self._lock:
            session, ids = self._free.pop()
        try:
            yield session
        finally:
            with self._lock:
                self._free.append((session, list(token_ids)))

    def close(self) -> None:
        for session, _ in self._free:
            session.close()


def config_of(settings: dict[str, Any]) -> GenerationConfig:
    known = {field.name for field in fields(GenerationConfig)}
    return GenerationConfig(**{name: value for name, value in settings.items() if name in known})


def encode(pipe: MirrorPipeline, prompt: str | None = None, messages: Any = None, **_: Any) -> list[int]:
    if _.get("token_ids") is not None:
        return list(_["token_ids"])
    if messages is not None:
        return pipe._tokenizer.encode_chat(messages)
    return pipe._tokenizer.encode(prompt)


def nth_seed(seed: int, index: int) -> int:
    return seed + index
