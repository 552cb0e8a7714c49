"""How the target's weights are stored: one format each for the layers, the LM head and the embedding.

Owns: the formats and the names that a user gives them. Does not own: packing numbers (`block_quantisation.py`),
putting the result into graphs (`quantise_pass.py`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
pass has. They are no default, as larger ones make windows faster (docs/exactness.md)."""
COMPUTE_BY_PRECISION = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "int8": "fp32", "int4": "fp32", FILE: "fp32"}
"""What the stages compute in, and so what their hidden states, caches and float weights are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Integers of `bits` bits with one scale, and one zero point unless symmetric, per `block_size` inputs of a row."""

    bits: int
    block_size: int = 32
    is_symmetric: bool = True

    @property
    def recipe(self) -> str:
        """A word that tells this format from every other.

        >>> BlockFormat(bits=4, block_size=128, is_symmetric=False).recipe
        'q4b128a'
        """
        return f"q{self.bits}b{self.block_size}{'' if self.is_symmetric else 'a'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoice:
    """What was chosen of a format; without a block size every width of rows gets its own."""

    bits: int
    block_size: int | None = None
    is_symmetric: bool = True

    def for_width(self, width: int) -> BlockFormat:
        """The format of rows of `width` weights: by default the largest blocks that pad no more than blocks of 32 do.

        Fewer scales are fewer bytes and fewer additions: on a CPU a row through blocks of 128 takes about 0.65 of the
        time through blocks of 32 (see docs/peers.md).

        >>> [BlockChoice(bits=4).for_width(width).block_size for width in (1152, 192, 40)]
        [128, 64, 64]
        """
        padded = -(-width // 32) * 32
        size = self.block_size or next(size for size in BLOCK_SIZES if padded % size == 0)
        return BlockFormat(bits=self.bits, block_size=size, is_symmetric=self.is_symmetric)

    @property
    def row_group(self) -> int:
        """Rows that the CPU's kernels compute together: with any multiple of it a row has the same bits.

        >>> [BlockChoice(bits=8, block_size=size).row_group for size in (64, 128)], BlockChoice(bits=4).row_group
        ([1, 2], 2)
        """
        largest = self.block_size or max(BLOCK_SIZES)
        return 1 if largest <= _INVARIANT_BLOCKS[self.bits] else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormats:
    """The formats of a target's weights; None stands for floats of the kind that the stages compute in.

    What `carried` holds keeps the blocks of its file instead.
    """

    layers: BlockChoice | None = None
    head: BlockChoice | None = None
    embedding: BlockChoice | None = None
    carried: "FileBlocks | None" = None


FLOAT_WEIGHTS = WeightFormats()


def choose_formats(
    precision: str, *, head: str, embedding: str, block_size: int | None, is_symmetric: bool, embedding_width: int
) -> WeightFormats:
    """Resolve precisions, "auto" among them, into formats.

    "auto" is 8 bits, symmetric, for the head and the embedding of a target whose layers are integers: where both are
    one tied matrix they so stay one. An embedding that is no whole number of blocks wide stays float under "auto".

    Raises:
        ConfigError: an embedding in blocks that do not divide `embedding_width`, or a float kind that the stages do not
            compute in.
    """
    if precision == FILE:
        block_size = _FILE_BLOCK
    layers = _format(precision, precision, block_size, is_symmetric)
    automatic = "int8" if layers is not None else precision
    blocks = BlockChoice(bits=8, block_size=block_size).for_width(embedding_width).block_size
    is_whole = embedding_width % blocks == 0
    if embedding in BITS_BY_PRECISION and not is_whole:
        raise ConfigError(
            f"embedding_precision is {embedding!r}, but its {embedding_width} columns are no whole number of blocks of "
            f"{blocks}; choose another block size, or {COMPUTE_BY_PRECISION[precision]!r}"
        )
    if embedding == "auto" and not is_whole:
        embedding = COMPUTE_BY_PRECISION[precision]
    return WeightFormats(
        layers=layers,
        head=_format(precision, automatic if head == "auto" else head, block_size, True),
        embedding=_format(precision, automatic if embedding == "auto" else embedding, block_size, True),
    )


def _format(precision: str, asked: str, block_size: int | None, is_symmetric: bool) -> BlockChoice | None:
    bits = BITS_BY_PRECISION.get(_FILE_FALLBACK if asked == FILE else asked)
    if bits is not None:
        return BlockChoice(bits=bits, block_size=block_size, is_symmetric=is_symmetric)
    compute = COMPUTE_BY_PRECISION[precision]
    if asked != compute:
        raise ConfigError(
            f"with precision {precision!r} the stages compute in {compute}, so a head or embedding in {asked!r} is not "
            f"possible; choose {compute}, {' or '.join(BITS_BY_PRECISION)}"
        )
    return None


def precision_name(chosen: BlockChoice | None, precision: str) -> str:
    """The name of a format under a target of `precision`.

    >>> precision_name(None, "int4"), precision_name(BlockChoice(bits=8), "int4")
    ('fp32', 'int8')
    """
    if precision == FILE and chosen is not None:
        return FILE
    return COMPUTE_BY_PRECISION[precision] if chosen is None else f"int{chosen.bits}"
