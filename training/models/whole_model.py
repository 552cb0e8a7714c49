"""Load a whole causal LM into memory, as training needs it.

Owns: every call of `from_pretrained` for models here. Does not own: checks on the folder (`mirrorsd.export`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mirrorsd.graphs.errors import ExportError

__all__ = ["load_whole"]


def load_whole(folder: Path) -> PreTrainedModel:
    """Load the model in `folder` in single precision, in evaluation mode.

    Raises:
        ExportError: It cannot be loaded, or lacks weights.
    """
    with _quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        except (SafetensorError, RuntimeError, ValueError, OSError) as error:
            raise ExportError(f"{folder} cannot be loaded: {error}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ExportError(
            f"{folder} lacks {len(missing)} weights, for example {missing[0]!r}: "
            "its config.json and its weights do not belong together"
        )
    whole: PreTrainedModel = model.eval()
    return whole


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' loading bars and reports away; what matters is raised."""
    logger = logging.getLogger("transformers")
    level = logger.level
    bars: Any = transformers_logging
    had_bars = bars.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            bars.enable_progress_bar()
