"""What an export will take, before any weights are read: disk, memory, minutes.

From the checkpoints' headers and what exports of 1, 3 and 8 billion parameters took (`bench/studies/export_memory.py`,
`bench/results/epyc/export_memory_*.json`), mapped pages counted: the peak is close to the target's own bytes in the
bundle, or to what the draft's comparison with PyTorch takes. The time is nearly that of reading and rounding the
weights. What needs no checkpoint needs no PyTorch either.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mirrorsd.export.options import ExportOptions
from mirrorsd.graphs.manifest import IN_BLOCKS, IN_ROWS
from mirrorsd.hub.asking import readable_bytes

_BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.5, "int4": 4.8, IN_ROWS: 8.5, IN_BLOCKS: 6.0}
"""Per parameter, scales and tables included."""
_LEAST_MEMORY = 0.9e9
_MEMORY_PER_BYTE = 1.25
"""Of the stored target, beside the least. 6.9 GB are promised where 6.7 were taken (8 billion parameters, int4), 1.7
where 1.8 (1 billion, int4), 5.6 where 4.6 (3 billion, int8): `bench/studies/export_memory.py`."""
_RUNNING_DRAFT_BYTES = 4
"""Of a draft's parameter: it is computed in fp32 whatever its file holds, which is mapped beside it."""
_RUNTIMES = 0.55e9
"""Python, both runtimes, a draft's kernels, and what a long answer's passes leave in their allocators."""
_CACHES = 0.07
"""Bytes of 2,048 tokens of context per parameter of the target: 0.076 of Qwen2.5-Coder-1.5B, 0.067 of Llama 8B"""
_SECONDS_PER_BILLION = (60.0, 230.0)
_LEAST_SECONDS = 10.0
"""Beside those. On two cores by the same study: 102 a billion (1 billion), 229 where the disk was slow (8 billion)."""
_INTEGER_MEMORY, _INTEGER_MEMORY_PER_BYTE = 0.9e9, 1.35
_INTEGER_SECONDS, _INTEGER_SECONDS_PER_BILLION = (30.0, 100.0), (60.0, 180.0)
"""What products of integers take beside that: their inputs are collected from a text, and rows are compared with the
floats'. By `/usr/bin/time -v mirrorsd export TARGET --draft DRAFT -o BUNDLE --precision int8` on two cores:
SmolLM2-135M 1.9 GB and 140 s (2.3 GB, 1 to 3 minutes are said), Qwen2.5-Coder-1.5B with its 0.5B 7.3 GB and 587 s,
or 300 s where the processor multiplies bfloat16 (7.8 GB, 5 to 16 minutes). A GGUF file stays mapped all along, and
counts beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportEstimate:
    """Bytes of the bundle and of memory at the peak; seconds from .. to, by the disk and the processor.

    Attributes:
        work_bytes: most that is on the disk while it works, if that is more than the bundle.
    """

    bundle_bytes: int
    memory_bytes: int
    seconds: tuple[float, float]
    work_bytes: int = 0

    @property
    def disk_bytes(self) -> int:
        """Most that is on the disk at a time."""
        return max(self.bundle_bytes, self.work_bytes)

    def __str__(self) -> str:
        """In a sentence's words."""
        first, last = (max(1, round(seconds / 60)) for seconds in self.seconds)
        minutes = f"{first} minute{'s' if first > 1 else ''}" if first == last else f"{first} to {last} minutes"
        disk, memory = readable_bytes(self.bundle_bytes), readable_bytes(self.memory_bytes)
        meanwhile = readable_bytes(self.disk_bytes)
        most = f" (up to {meanwhile} while it works)" if meanwhile != disk else ""
        return f"about {disk} of disk{most}, {memory} of memory, {minutes}"


def estimate_export(target: Path, draft: Path, options: ExportOptions) -> ExportEstimate:
    """Estimate from the sizes in the checkpoints' headers.

    Raises:
        ExportError: a checkpoint is missing, damaged or not supported.
    """
    from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
    from mirrorsd.export.verify.quality import FITTED_WINDOWS, RANGE_WINDOWS, WINDOW_ROWS
    from mirrorsd.export.weights.gguf_tensors import bundle_bytes
    from mirrorsd.families.registry import FAMILIES

    of_target, of_draft = open_checkpoint(target, "target"), open_checkpoint(draft, "draft")
    file_bytes = bundle_bytes(of_target.tensors) if options.precision not in _BITS else None
    has_experts = FAMILIES[of_target.source.family].mixture is not None  # they keep blocks
    found = estimate_sizes(
        of_target.source.num_parameters,
        of_draft.source.num_parameters,
        options,
        file_bytes,
        has_integers=options.may_have_integer_products and not has_experts,
    )
    files = {tensor.path for tensor in of_target.tensors.values()} if of_target.gguf is not None else ()
    bundle = found.bundle_bytes + _second_form(of_target.config, options)
    inputs = 0
    if options.rounding == "gptq":
        inputs = inputs_bytes(of_target.config, FITTED_WINDOWS * WINDOW_ROWS)
    elif options.may_have_integer_products and not has_experts:
        inputs = inputs_bytes(of_target.config, RANGE_WINDOWS * WINDOW_ROWS)
    # Integers are chosen, and their inputs dropped, before anything is written. A compressed draft's floats stay
    # beside it to the end.
    drafted = of_draft.source.num_parameters
    written = bundle + (0 if options.draft_compression is None else options.written_draft_bytes * drafted)
    beside = written + inputs if options.rounding == "gptq" else max(written, inputs)
    return replace(
        found,
        bundle_bytes=bundle,
        work_bytes=max(beside, options.passing_draft_bytes * drafted),
        memory_bytes=found.memory_bytes + sum(file.stat().st_size for file in files),
    )


def inputs_bytes(config: Mapping[str, Any], num_rows: int) -> int:
    """What the inputs of a model's products take on the disk, of so many rows in 16 bits.

    A layer has four of them: of queries, keys and values, of the attention's output, of gate and up, of down.

    >>> sizes = {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072}
    >>> inputs_bytes(sizes | {"num_attention_heads": 16, "head_dim": 128}, 8192) / 1e9
    3.288334336
    """
    width = _largest(config, "hidden_size", 0)
    inner = _largest(config, "intermediate_size", 4 * width)
    heads = _largest(config, "num_attention_heads", 0)
    attended = heads * _largest(config, "head_dim", width // max(heads, 1))
    return 2 * num_rows * _largest(config, "num_hidden_layers", 0) * (2 * width + attended + inner)


def _largest(config: Mapping[str, Any], name: str, default: int) -> int:
    """A field; where there is one for each layer, the largest."""
    found = config.get(name) or default
    return int(max(found) if isinstance(found, list) else found)


def _second_form(config: Mapping[str, Any], options: ExportOptions) -> int:
    """Bytes of a tied embedding that keeps blocks beside a head by row, as it does where the head would lose much."""
    if not (options.may_have_integer_products and config.get("tie_word_embeddings")):
        return 0
    return round(stored_bytes(int(config.get("vocab_size", 0)) * int(config.get("hidden_size", 0)), options.precision))


def estimate_sizes(
    target_parameters: int,
    draft_parameters: int,
    options: ExportOptions,
    file_bytes: int | None = None,
    *,
    has_integers: bool = False,
) -> ExportEstimate:
    """The same from numbers of parameters, and the bytes of a file's numbers where these are kept as they are.

    `has_integers` where the target's products may be of integers.
    """
    from mirrorsd.export.checkpoints.checkpoint import whole_bytes

    target_bytes = stored_bytes(target_parameters, options.precision) if file_bytes is None else file_bytes
    draft_bytes = stored_bytes(draft_parameters, options.draft_precision)
    billions = (target_parameters + draft_parameters) / 1e9
    mapped_bytes = 4 if options.draft_precision == "fp32" else 2
    of_integers = _INTEGER_MEMORY + _INTEGER_MEMORY_PER_BYTE * target_bytes if has_integers else 0.0
    memory = _LEAST_MEMORY + max(
        _MEMORY_PER_BYTE * target_bytes + of_integers,
        (_RUNNING_DRAFT_BYTES + mapped_bytes) * draft_parameters,
        whole_bytes(target_parameters),
        whole_bytes(draft_parameters),
    )
    seconds = [_LEAST_SECONDS + billions * rate for rate in _SECONDS_PER_BILLION]
    if has_integers:
        for place, (least, rate) in enumerate(zip(_INTEGER_SECONDS, _INTEGER_SECONDS_PER_BILLION, strict=True)):
            seconds[place] += least + rate * target_parameters / 1e9
    return ExportEstimate(
        bundle_bytes=round(target_bytes + draft_bytes), memory_bytes=round(memory), seconds=(seconds[0], seconds[1])
    )


def stored_bytes(num_parameters: int, precision: str) -> float:
    """Bytes of so many parameters in a bundle."""
    return num_parameters * _BITS[precision] / 8


def running_bytes(target_parameters: int, draft_parameters: int, precision: str, draft_precision: str) -> int:
    """Memory that answers of 2,048 tokens take on a processor; of a bundle that is there `mirrorsd doctor` knows more.

    An integer draft is computed from a copy of its own, beside its mapped file.
    """
    of_target = stored_bytes(target_parameters, precision) + _CACHES * target_parameters
    return round(_RUNTIMES + of_target + 2 * stored_bytes(draft_parameters, draft_precision))


def shortages(estimate: ExportEstimate, output: Path, free_memory: int | None) -> list[str]:
    """What there is too little of, in words; empty where all fits."""
    found = []
    place = next(folder for folder in (output.resolve() / "new").parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < estimate.disk_bytes:
        found.append(f"only {readable_bytes(free)} are free in {place}")
    if free_memory is not None and free_memory < estimate.memory_bytes:
        found.append(f"only {readable_bytes(free_memory)} of memory are free, so it may be slow or end early")
    return found
