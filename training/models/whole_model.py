"""Load a whole causal LM into memory, as training needs it.

Owns: every call of `from_pretrained` for models here. Does not own: checks on the folder (`mirrorsd.export`).
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mirrorsd.families.low_rank_head import EMBEDDING, HEAD_RANK, LM_HEAD, SHARES_EMBEDDING, fit_head
from mirrorsd.families.registry import loader_options
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.whole_file import is_gguf

__all__ = ["load_whole"]


def load_whole(path: Path, embedding: Tensor | None = None) -> PreTrainedModel:
    """Load the model in `path`, a folder or a GGUF file, in single precision, in evaluation mode.

    A draft with a head of low rank may leave its token embedding to its target: then it is `embedding` `[V, H]`.

    Raises:
        ExportError: It cannot be loaded, or lacks weights.
    """
    if (path / "config.json").is_file() and HEAD_RANK in json.loads((path / "config.json").read_text(encoding="utf-8")):
        return _load_low_rank(path, embedding)
    with _quiet_transformers(), _without_bars(path):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **_place(path), dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        except (SafetensorError, RuntimeError, ValueError, OSError) as error:
            raise ExportError(f"{path} cannot be loaded: {error}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ExportError(
            f"{path} lacks {len(missing)} weights, for example {missing[0]!r}: "
            "its config.json and its weights do not belong together"
        )
    if getattr(model.config, "quantization_config", None):  # what is marked so can neither be saved nor trained
        plain: Any = type(model)(model.config)
        plain.load_state_dict(model.state_dict())
        del plain.config.quantization_config
        model = plain
    whole: PreTrainedModel = model.eval()
    return whole


def _load_low_rank(folder: Path, embedding: Tensor | None) -> PreTrainedModel:
    """Load a model whose head Hugging Face's class does not have."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        network = fit_head(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        if getattr(network.config, SHARES_EMBEDDING, False) and embedding is not None:
            tensors[EMBEDDING] = embedding.detach().float().cpu()
            if network.config.tie_word_embeddings:
                tensors[LM_HEAD] = tensors[EMBEDDING]
        network.load_state_dict(tensors)
    except (SafetensorError, RuntimeError, ValueError, OSError) as error:
        raise ExportError(
            f"{folder} cannot be loaded (a draft that shares an embedding needs its target): {error}"
        ) from error
    whole: PreTrainedModel = network.eval()
    return whole


def _place(path: Path) -> dict[str, Any]:
    """Where `from_pretrained` finds the model, as its arguments."""
    if not is_gguf(path):
        config = path / "config.json"
        written = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        return {"pretrained_model_name_or_path": path, **loader_options(written)}
    config = path.with_suffix(names.GGUF_FILES_SUFFIX) / "config.json"  # with what transformers does not read of it
    given = {"config": AutoConfig.from_pretrained(config.parent, local_files_only=True)} if config.is_file() else {}
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, **given}


def _without_bars(path: Path) -> AbstractContextManager[object]:
    """The reader of GGUF files has a bar that nobody can turn off."""
    return redirect_stderr(io.StringIO()) if is_gguf(path) else nullcontext()


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
