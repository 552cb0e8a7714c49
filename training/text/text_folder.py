"""A folder of texts that the target wrote, one file per batch; a kill loses at most the batch in work.

Owns: the files, what they were made with (`plan.json`), and which part of them a process writes.
Does not own: generation (`self_text.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.whole_file import whole_file, write_whole
from mirrorsd.training.run.device import narrowed
from mirrorsd.training.text.self_text import SelfText, SelfTextConfig, generate_batch

__all__ = ["join_texts", "load_texts", "mark_own", "pack_tokens", "write_self_text"]

PLAN_FILE = "plan.json"
_MOST_SHORT_IDS = 1 << 16


def write_self_text(
    target: PreTrainedModel,
    prompts: list[list[int]],
    folder: Path,
    config: SelfTextConfig,
    part: tuple[int, int] = (0, 1),
    show: Callable[[str, float], None] = lambda words, share: None,
) -> None:
    """Write one file per batch into `folder`; batches that are there already are skipped.

    Args:
        target: The model; it writes in the type that products are made in.
        prompts: All prompts (the same list in every part).
        folder: Where the batches go.
        config: Limits, temperatures, seed.
        part: `(k, n)`: this process writes the batches `k, k + n, ...`.
        show: Told what was done, and which share of all batches is there.

    Raises:
        ConfigError: The folder holds texts of other prompts, of another target, or made with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_plan(folder, target, prompts, config)
    rng = np.random.default_rng(config.seed)
    drawn = torch.tensor(rng.choice(config.temperatures, size=len(prompts)), dtype=torch.float32)
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    batches = [by_length[start : start + config.batch] for start in range(0, len(prompts), config.batch)]
    order = rng.permutation(len(batches)).tolist()
    for place, batch_number in enumerate(order):
        path = folder / f"batch_{batch_number:05d}.npz"
        if place % part[1] != part[0] or path.exists():
            continue
        numbers = batches[batch_number]
        words = f"batch {place + 1} of {len(batches)}"
        report = partial(_show_part, show, words, place, len(batches))
        with narrowed(target.parameters()):
            texts = generate_batch(target, [prompts[number] for number in numbers], drawn[numbers], config, report)
        _save_batch(path, texts, [len(prompts[number]) for number in numbers], drawn[numbers].cpu().numpy())
        show(f"batch {place + 1} of {len(batches)}: {sum(map(len, texts))} tokens", (place + 1) / len(batches))


def _show_part(show: Callable[[str, float], None], words: str, place: int, count: int, share: float) -> None:
    show(words, (place + share) / count)


def _check_plan(folder: Path, target: PreTrainedModel, prompts: list[list[int]], config: SelfTextConfig) -> None:
    """Compare with what earlier batches were made with, or note it down for later ones."""
    digest = hashlib.sha256(json.dumps(prompts).encode("ascii"))
    for weight in list(target.parameters())[:2]:
        digest.update(weight.detach().float().flatten()[:4096].cpu().numpy().tobytes())
    plan: dict[str, Any] = {"made_from": digest.hexdigest(), "prompts": len(prompts), **asdict(config)}
    plan |= {"ends": list(config.ends), "temperatures": list(config.temperatures)}
    path = folder / PLAN_FILE
    if not path.is_file():
        write_whole(path, f"{json.dumps(plan, indent=2)}\n".encode())
        return
    found = _read_plan(path)
    differing = [name for name in plan if plan[name] != found.get(name)]
    if differing:
        raise ConfigError(
            f"{folder} holds texts that were made otherwise ({', '.join(differing)} differ; made_from stands for the "
            "prompts and the target's weights); give these texts a folder of their own"
        )


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} is damaged, so nobody knows how the texts beside it were made; remove both, or give these texts a "
            "folder of their own"
        )
    return found


def _save_batch(
    path: Path, texts: list[list[int]], prompt_lengths: list[int], temperatures: NDArray[np.float32]
) -> None:
    with whole_file(path) as stream:
        np.savez(
            stream,
            tokens=pack_tokens(texts),
            lengths=np.array([len(text) for text in texts]),
            prompt_lengths=np.array(prompt_lengths),
            temperatures=temperatures,
        )


def pack_tokens(texts: Sequence[list[int]]) -> NDArray[np.uint16 | np.uint32]:
    """Join token ids in as few bytes as they need."""
    joined = np.concatenate([np.array(text, np.uint32) for text in texts])
    return joined if joined.max(initial=0) >= _MOST_SHORT_IDS else joined.astype(np.uint16)


def load_texts(folder: Path) -> list[SelfText]:
    """Read all texts written so far.

    Raises:
        ConfigError: There are none, or a file is not whole.
    """
    texts = [text for path in sorted(folder.glob("batch_?????.npz")) for text in _read_batch(path)]
    if not texts:
        raise ConfigError(f"{folder} holds no text; let the target write some first (`mirrorsd train text`)")
    return texts


def _read_batch(path: Path) -> list[SelfText]:
    try:
        with path.open("rb") as stream, np.load(stream) as batch:
            parts = np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1])
            columns = zip(parts, batch["prompt_lengths"].tolist(), batch["temperatures"].tolist(), strict=True)
            return [SelfText(part.tolist(), length, temperature) for part, length, temperature in columns]
    except (BadZipFile, EOFError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a whole file of texts ({error}): it was cut short, or is still being copied. Copy it "
            "again; or remove it, and the target writes these texts again where it is given --corpus"
        ) from error


def join_texts(texts: Sequence[SelfText], seed: int = 0) -> NDArray[np.uint16 | np.uint32]:
    """Return the texts as one stream of tokens, in random order."""
    return pack_tokens([texts[number].tokens for number in _shuffled(texts, seed)])


def mark_own(texts: Sequence[SelfText], seed: int = 0) -> NDArray[np.bool_]:
    """Say of every token of `join_texts(texts, seed)` whether the target wrote it; its prompt it did not."""
    shuffled = [texts[number] for number in _shuffled(texts, seed)]
    return np.concatenate([np.arange(len(text.tokens)) >= text.prompt_length for text in shuffled])


def _shuffled(texts: Sequence[SelfText], seed: int) -> NDArray[np.intp]:
    return np.random.default_rng(seed).permutation(len(texts))
