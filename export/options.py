"""What an export is asked for, checked before any work. Needs neither torch nor a model.

Owns: the options and how "auto" is resolved against a pair's sizes. Does not own: reading checkpoints.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from mirrorsd.export.compression_plan import COMPRESSED, DraftCompression
from mirrorsd.export.weights.block_formats import (
    BITS_BY_PRECISION,
    BLOCK_SIZES,
    COMPUTE_BY_PRECISION,
    COMPUTES,
    FILE,
    WeightFormats,
    choose_formats,
)
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import DraftBucket

TARGET_PRECISIONS = tuple(COMPUTE_BY_PRECISION)
PART_PRECISIONS = ("auto", *(precision for precision in TARGET_PRECISIONS if precision != FILE))
ROUNDINGS = ("nearest", "gptq")
PRODUCTS = ("auto", "integer", "blocks")
DRAFT_PRECISIONS = ("fp32", "fp16", *COMPRESSED)
DEFAULT_BUCKETS = ((4, 1), (4, 4), (8, 1), (8, 8), (16, 16), (24, 24), (32, 32), (128, 1))
DEFAULT_CAPACITIES = (256, 512, 1024, 2048)
DEFAULT_CONTEXT = 2048
MIN_CONTEXT = 64


class ExportProgress(Protocol):
    """Receives what the export is doing: a stage name such as "export suffix", and the share done, 0..1."""

    def __call__(self, stage: str, fraction: float) -> None:
        """Draw or note it; must return quickly."""


_SHARES = (
    (0.0, 0.01, 0.02, 0.05, 0.12, 0.15, 0.20, 0.25, 0.65, 0.75, 0.95, 1.0),
    (0.0, 0.07, 0.30, 0.31, 0.44, 0.46, 0.61, 0.66, 0.78, 0.98, 0.99, 1.0),
)
"""Shares of an export without integer products, and of one with them when it is as far: means of SmolLM2-135M (108 s)
and Qwen2.5-Coder-1.5B (1,897 s), `mirrorsd export TARGET --draft DRAFT --precision int8 --draft-precision int8`."""


def with_scaling(report: ExportProgress) -> ExportProgress:
    """The same progress for an export that scales the inputs of its products first, which is a quarter of its work."""
    import numpy as np

    return lambda stage, fraction: report(stage, float(np.interp(fraction, *_SHARES)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How to export a pair.

    Attributes:
        exit_layers: Borders between segments (layers before each exit), or "auto": one, where `exit_coverage.json`
            beside the target says it is best, at half depth without that file.
        precision: Weights of the target's layers, one of `TARGET_PRECISIONS`. "file" is for GGUF files: their
            floats and blocks as they are, and in 8 bits what products can hold no blocks of.
        compute: What the stages compute in, one of `COMPUTES`, where their weights are integers: "auto" is fp32. CUDA
            has its attention in 16 bits alone.
        head_precision: Weights of the LM head and of the exits; "auto" is int8 where the layers are integers, and
            by GPTQ a scan in int4 whose best tokens are computed again in int8, where it is tied to the embedding.
        embedding_precision: The token embedding; "auto" as for the head, so that a tied matrix is stored once.
        block_size: Weights of a row that share a scale, where they are integers; None for 32 in int4, and in int8 for
            the largest that fit the embedding's width.
        is_symmetric: Whether integers of the layers have no zero points; None: int8 has none, int4 has. Head and
            embedding never have any.
        is_batch_invariant: Whether the CPU gives a row the same bits in passes of any number of rows, so that no method
            can differ from plain decoding by rounding; it costs int8 and int4 some of plain decoding's speed.
        products: Of int8 layers. "integer" rounds what a weight is multiplied with to 8 bits too: the product is then
            one of integers, and further rows cost little on a processor. "blocks" is the form that GPUs have, and it is
            finer. "auto" is what is faster on this processor.
        rounding: "nearest", or "gptq": what minimises the layers' error on the calibration text, with 8 bits for the
            kinds of product that 4 hurt most (takes longer).
        draft_precision: Draft weights, one of `DRAFT_PRECISIONS`.
        draft_group, draft_data_aware, allow_draft_loss: See `DraftCompression`.
        context: Longest text in tokens; None means the smaller of 2048 and what both models were made for.
        num_exit_candidates: Tokens that an exit names per row (K).
        num_draft_candidates: Tokens that the draft names per tip and stream (m).
        draft_noise: Whether the draft ranks its candidates with the noise of sampling over its whole vocabulary; None
            means yes for small vocabularies.
        buckets: Static (rows, tips) shapes of the draft.
        capacities: Static cache capacities of the draft; those at or above `context` are replaced by it.
        verify_text: Text for the parity check; None means the one in the package.
        calibration_text: Text for the report on quality and for "gptq"; None means `calibration.txt` beside the
            target's weights, and without that file the text in the package.
        accept_error: Largest error of a stage, in standard deviations of what PyTorch says at a row, instead of the
            bounds of `tolerances.py`.
        heads: Folders of heads that draft from the target's hidden states, one of a kind.
        overwrite: Replace an existing bundle once the new one is complete.
    """

    exit_layers: Literal["auto"] | tuple[int, ...] = "auto"
    precision: str = "int8"
    compute: str = "auto"
    head_precision: str = "auto"
    embedding_precision: str = "auto"
    block_size: int | None = None
    is_symmetric: bool | None = None
    is_batch_invariant: bool = True
    products: str = "auto"
    rounding: str = "nearest"
    draft_precision: str = "fp32"
    draft_group: int = 128
    draft_data_aware: bool = False
    allow_draft_loss: bool = False
    context: int | None = None
    num_exit_candidates: int = 16
    num_draft_candidates: int = 16
    draft_noise: bool | None = None
    buckets: tuple[tuple[int, int], ...] = DEFAULT_BUCKETS
    capacities: tuple[int, ...] = DEFAULT_CAPACITIES
    verify_text: str | None = None
    calibration_text: str | None = None
    accept_error: float | None = None
    heads: tuple[str, ...] = ()
    overwrite: bool = False

    def __post_init__(self) -> None:
        _check_choice("precision", self.precision, TARGET_PRECISIONS)
        if self.precision == FILE and (self.block_size, self.is_symmetric) != (None, None):
            raise ConfigError(
                "precision is 'file': blocks and zero points are those of the GGUF file; leave block_size and "
                "is_symmetric alone, or choose int8 or int4"
            )
        if self.precision == FILE and (self.head_precision, self.embedding_precision) != ("auto", "auto"):
            raise ConfigError(
                "precision is 'file': head and embedding are as they are in the GGUF file; leave head_precision and "
                "embedding_precision alone, or choose another precision"
            )
        _check_choice("compute", self.compute, ("auto", *COMPUTES))
        if self.compute not in ("auto", COMPUTE_BY_PRECISION[self.precision]) and not self._has_integers:
            raise ConfigError(
                f"compute is {self.compute!r} with precision {self.precision!r}, which computes in "
                f"{COMPUTE_BY_PRECISION[self.precision]}; only {' and '.join(BITS_BY_PRECISION)} leave a choice"
            )
        for name in ("head_precision", "embedding_precision"):
            _check_choice(name, getattr(self, name), PART_PRECISIONS)
            self._check_floats(name)
        _check_choice("rounding", self.rounding, ROUNDINGS)
        _check_choice("products", self.products, PRODUCTS)
        if self.products == "integer" and not self.may_have_integer_products:
            raise ConfigError(
                "products is 'integer', which is for symmetric int8 layers without block_size that compute in fp32; "
                f"found precision {self.precision!r}, compute {self.computes_in}, block_size {self.block_size}, "
                f"is_symmetric {self.is_symmetric}"
            )
        _check_choice("draft_precision", self.draft_precision, DRAFT_PRECISIONS)
        # Built here for its own checks.
        if self.draft_compression is None and self.draft_data_aware:
            raise ConfigError(f"draft_data_aware is for int4; draft_precision is {self.draft_precision!r}")
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size is {self.block_size}; supported are {', '.join(map(str, BLOCK_SIZES))}")
        if self.rounding != "nearest" and self.precision != "int4":
            raise ConfigError(f"rounding is {self.rounding!r} with precision {self.precision!r}; it is for int4 layers")
        self.formats(max(BLOCK_SIZES))
        if self.context is not None and self.context < MIN_CONTEXT:
            raise ConfigError(f"context is {self.context}; at least {MIN_CONTEXT} tokens are needed")
        for name in ("num_exit_candidates", "num_draft_candidates"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.accept_error is not None and not 0 < self.accept_error < float("inf"):
            raise ConfigError(f"accept_error is {self.accept_error}; allowed are positive numbers, such as 0.02")
        if self.exit_layers != "auto":
            _check_ascending("exit_layers", self.exit_layers)
        _check_ascending("capacities", self.capacities)
        if not self.buckets or any(not 1 <= tips <= rows for rows, tips in self.buckets):
            raise ConfigError(f"buckets is {self.buckets}; every (rows, tips) needs 1 <= tips <= rows")

    @property
    def _has_integers(self) -> bool:
        return self.precision in BITS_BY_PRECISION

    def _check_floats(self, part: str) -> None:
        asked = getattr(self, part)
        if asked in COMPUTES and asked != self.computes_in:
            raise ConfigError(
                f"{part} is {asked!r} with precision {self.precision!r}, but the stages compute in {self.computes_in}; "
                f"choose {self.computes_in}, {' or '.join(BITS_BY_PRECISION)}"
            )

    @property
    def may_have_integer_products(self) -> bool:
        """Whether these options leave the form of the layers' products open."""
        is_plain = self.block_size is None and self.is_symmetric in (None, True) and self.computes_in == "fp32"
        return self.precision == "int8" and is_plain and self.products != "blocks"

    @property
    def computes_in(self) -> str:
        """What the stages compute in, "auto" resolved.

        >>> ExportOptions(precision="int4").computes_in, ExportOptions(precision="int4", compute="fp16").computes_in
        ('fp32', 'fp16')
        """
        return COMPUTE_BY_PRECISION[self.precision] if self.compute == "auto" else self.compute

    def formats(self, embedding_width: int) -> WeightFormats:
        """How the weights of a target with an embedding of `embedding_width` columns are stored.

        Raises:
            ConfigError: see `choose_formats`.
        """
        return choose_formats(
            self.precision,
            head=self.head_precision,
            embedding=self.embedding_precision,
            block_size=self.block_size,
            is_symmetric=self.is_symmetric,
            embedding_width=embedding_width,
        )

    @property
    def draft_compression(self) -> DraftCompression | None:
        """How to compress the draft; None where its weights stay floating point."""
        if self.draft_precision not in COMPRESSED:
            return None
        return DraftCompression(
            weights=self.draft_precision,
            group_size=self.draft_group,
            is_data_aware=self.draft_data_aware,
            allows_loss=self.allow_draft_loss,
        )

    @property
    def written_draft_bytes(self) -> int:
        """Bytes a number of the draft's IR in floats, which is what a compressed draft is made from."""
        return 4 if self.draft_precision == "fp32" else 2

    @property
    def passing_draft_bytes(self) -> int:
        """Bytes a number of the draft while its IR is written: it is made from an ONNX file in float32 beside it."""
        return 4 + self.written_draft_bytes

    @property
    def draft_buckets(self) -> tuple[DraftBucket, ...]:
        """The buckets as the manifest writes them."""
        return tuple(DraftBucket(rows=rows, tips=tips) for rows, tips in self.buckets)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; supported are {', '.join(allowed)}")


def _check_ascending(name: str, numbers: tuple[int, ...]) -> None:
    if not numbers or numbers[0] < 1 or list(numbers) != sorted(set(numbers)):
        raise ConfigError(f"{name} is {numbers}; give one or more different numbers above 0 in rising order")


def check_exit_layers(asked: Literal["auto"] | tuple[int, ...], num_layers: int) -> None:
    """Accept the borders that were asked for in a target of `num_layers` layers.

    Raises:
        ConfigError: a border outside `1 .. num_layers - 1`, or a target with a single layer.
    """
    if num_layers < 2:
        raise ConfigError(f"the target has {num_layers} layer; an exit needs a target with at least 2")
    if asked != "auto" and asked[-1] >= num_layers:
        raise ConfigError(f"exit layer is {asked[-1]}; this target allows 1..{num_layers - 1}")


def resolve_context(asked: int | None, *, by_target: int, by_draft: int) -> int:
    """Return the context for a pair made for `by_target` and `by_draft` positions.

    Raises:
        ConfigError: more was asked for than either model was made for.
    """
    limit = min(by_target, by_draft)
    if asked is None:
        return min(DEFAULT_CONTEXT, limit)
    if asked > limit:
        whose = "target" if by_target <= by_draft else "draft"
        raise ConfigError(f"context is {asked}; the {whose} was made for {limit} positions: ask for at most {limit}")
    return asked


def resolve_capacities(capacities: tuple[int, ...], context: int) -> tuple[int, ...]:
    """Return the draft's cache capacities up to and including `context`.

    >>> resolve_capacities((256, 512, 1024, 2048), 1000)
    (256, 512, 1000)
    """
    return (*(capacity for capacity in capacities if capacity < context), context)
