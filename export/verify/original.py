"""Is what is exported what transformers loads? Its own loader reads the folder again and is asked.

Owns: loading a checkpoint with `AutoModelForCausalLM.from_pretrained`, within a bound of memory, and comparing its
parameters and logits with ours. Does not own: which tensors we read (`checkpoints/weightless.py`), what rounding costs.
"""

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from mirrorsd.devices.containers import available_memory
from mirrorsd.export.checkpoints.checkpoint import Checkpoint, whole_bytes
from mirrorsd.export.checkpoints.weightless import WeightlessModel
from mirrorsd.export.verify.comparison import Comparison
from mirrorsd.export.verify.tolerances import check_parity, tolerance_of
from mirrorsd.export.weights.stored_tensors import StoredTensor
from mirrorsd.families.experts import separate_experts
from mirrorsd.families.low_rank_head import HEAD_RANK, SHARES_EMBEDDING
from mirrorsd.families.registry import FAMILIES, error_words, loader_options
from mirrorsd.graphs.errors import ExportError, ParityError
from mirrorsd.graphs.manifest import Compared

Array = npt.NDArray[Any]

_COMPARED_ROWS = 64
_WHOLE_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class Original:
    """A checkpoint as transformers loads it, if it does, and how far it was compared.

    `model` runs in float32 where `compared` is "logits"; else there is none to run.
    """

    compared: Compared
    model: WeightlessModel | None = None


def compare_original(checkpoint: Checkpoint, model: WeightlessModel, window: Array) -> Original:
    """Compare `model`, which lends our choice of tensors, with what transformers loads from the same place.

    Every parameter is compared bit by bit. Where the model's float32 numbers fit in memory, the logits of the first
    64 ids of `window [L]` are compared too. Else transformers maps the files, and a tensor's pages are given back
    when it has been read. Not compared, nor run, are drafts that only this project can load, and what transformers
    would have to hold as a whole though it is too large for that: GGUF files, and mixtures, whose experts it joins.

    Raises:
        ExportError: transformers cannot load it.
        ParityError: a parameter or the logits differ.
    """
    is_ours = any(checkpoint.config.get(name) for name in (HEAD_RANK, SHARES_EMBEDDING))
    needed = whole_bytes(checkpoint.source.num_parameters)
    is_whole = 0 < needed < available_memory()
    ids = window[window < int(checkpoint.config["vocab_size"])][None, :_COMPARED_ROWS]
    must_be_whole = checkpoint.gguf is not None or FAMILIES[checkpoint.source.family].mixture is not None
    if is_ours or (must_be_whole and not is_whole):
        return Original("")
    network = _load(checkpoint, torch.float32 if is_whole else _main_dtype(checkpoint))
    _compare_parameters(checkpoint, model, network, is_mapped=not is_whole)
    if not is_whole:
        return Original("tensors")
    original = WeightlessModel(network=network, stored={}, folder=checkpoint.folder)
    compared = Comparison("original")
    ours, theirs = (each.logits(ids)[0] for each in (model, original))
    compared.add(ours, theirs, theirs.std(axis=-1))
    compared.add_choices(ours.argmax(-1) == theirs.argmax(-1), np.zeros(len(ours)))
    if np.isfinite(theirs).all():
        check_parity([compared.result("")], tolerance_of("float32", None))
    return Original("logits", original)


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    place = checkpoint.gguf or checkpoint.folder
    options = {"pretrained_model_name_or_path": place, **loader_options(checkpoint.config)}
    if checkpoint.gguf is not None:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        options = {"pretrained_model_name_or_path": place.parent, "gguf_file": place.name, "config": config}
    loader: Any = AutoModelForCausalLM
    try:
        with _quiet():
            network, report = loader.from_pretrained(
                **options,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever transformers raises is a fault of what it read
        reason = f"{type(error).__name__}: {error_words(error)}"
        raise ExportError(f"the {checkpoint.role} {place} cannot be loaded by transformers: {reason}") from error
    if report["missing_keys"]:
        raise ExportError(
            f"the {checkpoint.role} {place} lacks {sorted(report['missing_keys'])[0]!r} for transformers, which would "
            "fill in random numbers: download it again"
        )
    return network.eval()


def _main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The floats that most of the numbers are stored in: those are mapped as they are, and take no memory."""
    sizes: dict[torch.dtype, int] = {}
    for stored in checkpoint.tensors.values():
        if stored.dtype in _TORCH_DTYPES:
            dtype = _TORCH_DTYPES[stored.dtype]
            sizes[dtype] = sizes.get(dtype, 0) + stored.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def _compare_parameters(checkpoint: Checkpoint, model: WeightlessModel, network: Any, *, is_mapped: bool) -> None:
    """Compare each parameter and buffer, some rows at a time.

    Raises:
        ParityError: one differs.
    """
    ours = dict(model.network.named_parameters(remove_duplicate=False))
    with separate_experts(network):
        theirs = dict(network.named_parameters(remove_duplicate=False))
    if unlike := sorted(ours.keys() ^ theirs.keys()):
        raise ParityError(
            f"the {checkpoint.role} {checkpoint.path} has other parameters in transformers: {unlike[0]!r}"
        )
    seen: set[tuple[int, int]] = set()
    for name, parameter in theirs.items():
        pair = (id(ours[name]), id(parameter))
        stored = model.stored[pair[0]]
        if pair not in seen and not _holds(stored, parameter, is_mapped=is_mapped):
            raise ParityError(
                f"the {checkpoint.role} {checkpoint.path} has other numbers for {name!r} in transformers than "
                f"those that were read from {stored.path.name} as {stored.name!r}. That is a defect of ours: please "
                "report it"
            )
        seen.add(pair)
    buffers = dict(network.named_buffers())
    for name, buffer in model.network.named_buffers():
        other = buffers.get(name)
        if other is not None and other.dtype == buffer.dtype and not torch.equal(other, buffer):
            raise ParityError(f"the {checkpoint.role} {checkpoint.path} has another {name!r} in transformers")


def _holds(stored: StoredTensor, parameter: nn.Parameter, *, is_mapped: bool) -> bool:
    """Whether a parameter holds a stored tensor's numbers, bit by bit; mapped pages are given back as it is read."""
    if stored.shape != tuple(parameter.shape):
        return False
    num_rows = stored.shape[0] if stored.shape else 1
    rows = parameter.detach().reshape(num_rows, stored.size // max(num_rows, 1))
    start = 0
    for chunk in stored.chunks(parameter.dtype):
        expected = rows[start : start + len(chunk) if stored.shape else 1]
        if not torch.equal(_bits(chunk).reshape(expected.shape), _bits(expected)):
            return False
        if is_mapped and _TORCH_DTYPES.get(stored.dtype) == parameter.dtype:
            _give_back(expected)
        start += len(expected)
    return True


def _bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(_WHOLE_BITS[numbers.element_size()])


def _give_back(rows: Tensor) -> None:
    """Take the pages of a mapped file out of this process. Elsewhere than on Linux the system does it when it must."""
    if sys.platform != "linux":
        return
    start, size = rows.data_ptr(), rows.numel() * rows.element_size()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own talk and bars off the terminal."""
    level, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if has_bars:
            transformers_logging.enable_progress_bar()
