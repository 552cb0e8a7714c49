"""How the target's weights are stored: one format each for the layers, the LM head and the embedding.

Owns: the formats and the names that a user gives them. Does not own: packing numbers (`block_quantisation.py`),
putting the result into graphs (`quantise.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd.export.weights.gguf_tensors import FileBlocks

BITS_BY_PRECISION = {"int8": 8, "int4": 4}
FILE = "file"
"""The precision of a GGUF file: its own blocks where products can be computed with them, 8 bits elsewhere."""
_FILE_FALLBACK = "int8"
BLOCK_SIZES = (128, 64, 32)
_FILE_BLOCK = 32
_INVARIANT_BLOCKS = {8: 64, 4: 32}
"""By bits: in blocks of up to so many weights ONNX Runtime's CPU kernels give a row the same bits however many rows a
pass has; with larger ones rows are computed in pairs (docs/exactness.md)."""
_INT4_BLOCK = 32
"""Four bits have too few levels for more weights: of SmolLM2-135M's best tokens 64 % are the same in the largest blocks
that fit, without zero points (docs/export.md). Such a row needs no pair either."""
NUM_RESCORED = 32
"""Of a head that is scanned. SmolLM2-135M's best tokens are the float head's at 98.7 % with 16 as with 64, at 91.1 %
without; perplexity rises by 0.6 % with 16, 0.5 % with 32, 0.3 % with 64, where looking them up takes twice as long."""
COMPUTE_BY_PRECISION = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "int8": "fp32", "int4": "fp32", FILE: "fp32"}
"""What the stages compute in unless asked otherwise, and so what their hidden states, caches and float weights are."""
COMPUTES = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Integers of `bits` bits with one scale, and one zero point unless symmetric, per `block_size` inputs of a row.

    With `is_by_row` a whole row is one block, and what it is multiplied with is rounded to integers too, a row of that
    at a time: the product is one of integers, whose bits no number of rows can change.
    """

    bits: int
    block_size: int = 32
    is_symmetric: bool = True
    is_by_row: bool = False

    @property
    def recipe(self) -> str:
        """A word that tells this format from every other.

        >>> BlockFormat(bits=4, block_size=128, is_symmetric=False).recipe
        'q4b128a'
        """
        if self.is_by_row:
            return f"q{self.bits}row"
        return f"q{self.bits}b{self.block_size}{'' if self.is_symmetric else 'a'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoice:
    """What was chosen of a format; without a block size every width of rows gets its own, of `largest` at most."""

    bits: int
    block_size: int | None = None
    is_symmetric: bool = True
    largest: int = max(BLOCK_SIZES)
    is_by_row: bool = False

    def for_width(self, width: int) -> BlockFormat:
        """The format of rows of `width` weights: by default the largest blocks that pad no more than blocks of 32 do.

        Fewer scales are fewer bytes and fewer additions: on a CPU a row through blocks of 128 takes about 0.65 of the
        time through blocks of 32 (see docs/peers.md).

        >>> [BlockChoice(bits=8).for_width(width).block_size for width in (1152, 192, 40)]
        [128, 64, 64]
        >>> BlockChoice(bits=8, largest=64).for_width(1152).block_size
        64
        """
        if self.is_by_row:
            return BlockFormat(bits=self.bits, block_size=width, is_by_row=True)
        padded = -(-width // 32) * 32
        fitting = (size for size in BLOCK_SIZES if size <= self.largest and padded % size == 0)
        size = self.block_size or next(fitting)
        return BlockFormat(bits=self.bits, block_size=size, is_symmetric=self.is_symmetric)

    def has_whole_blocks(self, width: int) -> bool:
        """Whether a row of `width` weights is whole blocks, as a look-up wants it: it gives all that is stored.

        >>> [BlockChoice(bits=8, largest=64).has_whole_blocks(width) for width in (288, 80)]
        [True, False]
        """
        return width % self.for_width(width).block_size == 0

    @property
    def row_group(self) -> int:
        """Rows that the CPU's kernels compute together: with any multiple of it a row has the same bits.

        >>> [BlockChoice(bits=8, block_size=size).row_group for size in (64, 128)], BlockChoice(bits=4).row_group
        ([1, 2], 2)
        """
        largest = self.block_size or self.largest
        return 1 if self.is_by_row or largest <= _INVARIANT_BLOCKS[self.bits] else 2


@dataclass(frozen=True, slots=True, eq=False)
class InputScaling:
    """How the rows that a weight `[N, K]` is multiplied with are prepared for rounding them to integers.

    Attributes:
        factors: float32 `[K]`: an input is divided by its factor, and the weight's column multiplied with it. None for
            inputs as they are.
        largest: The magnitude that stands for the last level, for all rows; None for each row's own largest.
        is_rotated: Whether what is left is then rotated (`rotation.py`), as the weight's columns are.
    """

    factors: NDArray[np.float32] | None
    largest: float | None = None
    is_rotated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormats:
    """The formats of a target's weights; None stands for floats of the kind that the stages compute in.

    What `carried` holds keeps the blocks of its file instead. `finer` has the layers' weights that are stored in a form
    of their own, mostly in more bits than `layers` says, by name; `floats` names those that stay floats: routers.
    `inputs` says how what a weight is multiplied with is scaled before it is rounded, for weights by row. Where there
    is a `scan`, the LM head's product is with weights in that format, and the logits of a row's best `NUM_RESCORED`
    tokens are then computed again with the embedding's.
    """

    layers: BlockChoice | None = None
    head: BlockChoice | None = None
    embedding: BlockChoice | None = None
    carried: "FileBlocks | None" = None
    finer: Mapping[str, BlockChoice] = field(default_factory=dict)
    scan: BlockChoice | None = None
    floats: frozenset[str] = frozenset()
    inputs: Mapping[str, InputScaling] = field(default_factory=dict)

    @property
    def of_single_rows(self) -> "WeightFormats":
        """The same in blocks small enough that no row needs another beside it; a block size that was asked for stays.

        >>> WeightFormats(head=BlockChoice(bits=8), layers=BlockChoice(bits=4, block_size=128)).of_single_rows.row_group
        2
        """
        head, embedding, layers = (
            None if part is None else replace(part, largest=min(part.largest, _INVARIANT_BLOCKS[part.bits]))
            for part in (self.head, self.embedding, self.layers)
        )
        return replace(self, head=head, embedding=embedding, layers=layers)

    @property
    def in_blocks(self) -> "WeightFormats":
        """The same for products whose rows are not scaled: rows of which nothing is known keep blocks of weights."""
        return replace(
            self,
            layers=None if self.layers is None else replace(self.layers, is_by_row=False),
            head=None if self.head is None else replace(self.head, is_by_row=False),
        )

    @property
    def of_head(self) -> BlockChoice | None:
        """The format of the weights that every row is multiplied with in the LM head."""
        return self.scan or self.head

    @property
    def num_rescored(self) -> int:
        """The best tokens of a row whose logits are computed again."""
        return 0 if self.scan is None else NUM_RESCORED

    def of_layer(self, name: str) -> BlockChoice | None:
        """The format of a layer's weight."""
        return None if name in self.floats else self.finer.get(name, self.layers)

    @property
    def apart(self) -> list[str]:
        """The layers' weights that have more bits than the others, or are in blocks where those are by row."""
        layers = self.layers
        forms = {name: (choice.bits, choice.is_by_row) for name, choice in self.finer.items()}
        return [name for name, form in forms.items() if layers is None or form != (layers.bits, layers.is_by_row)]

    def with_finer(self, weights: Iterable[str]) -> "WeightFormats":
        """The same with `weights` of the layers in 8 bits, in the head's blocks where that has 8 bits too."""
        if self.layers is None:
            return self
        is_like_head = self.head is not None and self.head.bits == 8
        chosen = self.head if is_like_head else replace(self.layers, bits=8, is_symmetric=True)
        assert chosen is not None  # `is_like_head` says so
        return replace(self, finer={**self.finer, **dict.fromkeys(weights, chosen)})

    @property
    def row_group(self) -> int:
        """Rows with multiples of which every product gives a row the same bits."""
        chosen = (self.layers, self.head, self.scan, *self.finer.values())
        return max((part.row_group for part in chosen if part is not None), default=1)


FLOAT_WEIGHTS = WeightFormats()


def choose_formats(
    precision: str,
    *,
    head: str,
    embedding: str,
    block_size: int | None,
    is_symmetric: bool | None,
    embedding_width: int,
) -> WeightFormats:
    """Resolve precisions, "auto" among them, into formats.

    "auto" is 8 bits, symmetric, for the head and the embedding of a target whose layers are integers: where both are
    one tied matrix they so stay one. An embedding that is no whole number of blocks wide stays float under "auto".

    Without a block size 4 bits get blocks of 32, and 8 bits blocks that are nowhere larger than fit the embedding: one
    product in larger blocks would ask for pairs of rows everywhere, which costs a deep, narrow model a fifth of its
    speed. `is_symmetric` None means zero points for 4 bits alone.

    Raises:
        ConfigError: an embedding in blocks that do not divide `embedding_width`.
    """
    if precision == FILE:
        block_size = _FILE_BLOCK
    blocks = BlockChoice(bits=8, block_size=block_size).for_width(embedding_width).block_size
    largest = blocks if block_size is None else max(BLOCK_SIZES)
    of_parts = BlockChoice(bits=8, block_size=block_size, largest=largest)
    has_zero_points = precision == "int4" if is_symmetric is None else not is_symmetric
    layers = _format(precision, replace(of_parts, is_symmetric=not has_zero_points))
    automatic = "int8" if layers is not None else precision
    is_whole = of_parts.has_whole_blocks(embedding_width)
    if embedding in BITS_BY_PRECISION and not is_whole:
        raise ConfigError(
            f"embedding_precision is {embedding!r}, but its {embedding_width} columns are no whole number of blocks of "
            f"{blocks}; choose another block size, or 'auto' for floats"
        )
    of_embedding = None
    if embedding != "auto" or is_whole:
        of_embedding = _format(automatic if embedding == "auto" else embedding, of_parts)
    return WeightFormats(
        layers=layers, head=_format(automatic if head == "auto" else head, of_parts), embedding=of_embedding
    )


def _format(asked: str, chosen: BlockChoice) -> BlockChoice | None:
    """`chosen` with the bits of what is asked for; None where that is floats."""
    bits = BITS_BY_PRECISION.get(_FILE_FALLBACK if asked == FILE else asked)
    if bits is None:
        return None
    is_capped = bits == 4 and chosen.block_size is None
    return replace(chosen, bits=bits, largest=_INT4_BLOCK if is_capped else chosen.largest)


def precision_name(chosen: BlockChoice | None, precision: str, compute: str) -> str:
    """The name of a format under a target of `precision` that computes in `compute`.

    >>> precision_name(None, "int4", "fp16"), precision_name(BlockChoice(bits=8), "int4", "fp16")
    ('fp16', 'int8')
    """
    if precision == FILE and chosen is not None:
        return FILE
    return compute if chosen is None else f"int{chosen.bits}"
