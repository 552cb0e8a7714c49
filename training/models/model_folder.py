"""Finished model folders: they appear complete or not at all, with the tokenizer of the target.

Owns: building beside the place and renaming; which of the target's files a draft carries.
Does not own: weights (`streaming_draft.py`), checkpoints of a run (`checkpoints.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from mirrorsd.graphs.errors import ConfigError, ExportError

__all__ = ["copy_tokenizer", "finished_folder"]

_CARRIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@contextmanager
def finished_folder(final: Path) -> Iterator[Path]:
    """Give an empty folder to fill; it replaces the model in `final` once the block ends without an error.

    Raises:
        ConfigError: `final` is there and holds something else than a model.
        ExportError: Weights could not be written, as on a full disk.
    """
    check_replaceable(final)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except SafetensorError as error:
        raise ExportError(f"{final} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_replaceable(final: Path) -> None:
    """Refuse to write over anything but a model folder or an empty one.

    Raises:
        ConfigError: There is something else.
    """
    if final.exists() and not (final.is_dir() and ((final / "config.json").is_file() or not any(final.iterdir()))):
        raise ConfigError(f"{final} exists and is not a model's folder, so it is not overwritten; choose another name")


def copy_tokenizer(target: Path, folder: Path) -> None:
    """Copy the target's tokenizer, chat template and generation defaults."""
    for pattern in _CARRIED:
        for file in target.glob(pattern):
            shutil.copyfile(file, folder / file.name)
