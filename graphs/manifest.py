"""`manifest.json`: what a bundle contains, typed, with the checks that need nothing but the manifest itself.

Reading files and hashing them is `bundle_files`; this module only knows the document.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mirrorsd.graphs import names
from mirrorsd.graphs.chat_defaults import ChatDefaults, chat_defaults
from mirrorsd.graphs.contract import DraftShape, HeadShape, TargetShape

SCHEMA_VERSION = 2
CHECKSUM = "checksum"
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


Compared = Literal["", "tensors", "logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """Where a model came from: folder or hub name, Hugging Face `model_type`, licence (SPDX id or "unknown").

    `revision` is the commit on the hub that the files are of; empty where they came from elsewhere. `training_seconds`
    are those of a core that a draft or a head was trained for; None where its folder does not say. `compared` says how
    the export made sure that it reads what transformers loads: by every tensor's bits, by these and the logits, or not.
    """

    name: str
    family: str
    licence: str
    num_parameters: int
    revision: str = ""
    training_seconds: float | None = None
    compared: Compared = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One piece of the target: layers `first_layer .. end_layer - 1`, as an ONNX file.

    `taps` are the hidden states behind its layers that heads read, by layer (`HeadShape.taps`).
    """

    name: str
    file: str
    first_layer: int
    end_layer: int
    taps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """An exit after `layer` layers. `adapter_rank` is 0 where the plain final norm and LM head are used."""

    name: str
    file: str
    layer: int
    num_candidates: int
    adapter_rank: int


INTEGER_PRODUCTS = "integer"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStorage:
    """How the target's weights are stored: precisions of its parts, and of integers the blocks and the rounding.

    Attributes:
        block_size: Most weights that share a scale; None where the layers are floats.
        carried: Of a GGUF file, the kinds of numbers that are in the bundle as they are in the file ("Q4_K", "F16").
        finer: The layers' weights that have 8 bits where `layers` says fewer, "*" for the numbers in their names; where
            a kind has them in some layers alone, these in the place of the first "*": "0-3,9".
        num_rescored: Of each row, the best tokens whose logits are computed again with the embedding's weights.
        products: Of integers, what their products are of: "blocks" of weights and floats, or "integer": rows of 8-bit
            weights, and of 8-bit inputs.
        dequantised: The kinds that were turned into floats, and rounded again where the part's precision asks for it.
    """

    layers: str
    head: str
    embedding: str
    block_size: int | None
    is_symmetric: bool
    rounding: str
    carried: tuple[str, ...] = ()
    finer: tuple[str, ...] = ()
    num_rescored: int = 0
    products: str = "blocks"
    dequantised: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEntry:
    """The target: sizes, the chain of segments and the exits at its borders.

    Attributes:
        precision: that of its layers.
        context: the longest text, in tokens.
        spare_rows: rows of zeros that its attention adds behind those of a pass, so that one row is computed as many
            are; `seqlens_k` and `total_length` count them, and the caches have room for them.
        row_group: rows that ONNX Runtime's CPU kernels compute together under these weights; passes of a multiple of it
            give a row the same bits, so there the runtime fills passes up.
        read_bytes: weights that a pass reads, of a mixture a pass of one row; exits and table look-ups are left out.
            0 where an older export did not count.
    """

    source: SourceModel
    shape: TargetShape
    precision: str
    context: int
    segments: tuple[Segment, ...]
    exits: tuple[Exit, ...]
    weights_file: str
    storage: WeightStorage | None = None
    spare_rows: int = 0
    row_group: int = 1
    read_bytes: int = 0

    @property
    def computes_in(self) -> str:
        """What a device must have: the dtype of its stages, or "integers" where 8-bit rows are multiplied."""
        has_integers = self.storage is not None and self.storage.products == INTEGER_PRODUCTS
        return "integers" if has_integers else self.shape.dtype

    @property
    def recurrence_file(self) -> str | None:
        """The stage that runs recurrent layers over accepted rows; None where there are no such layers."""
        return names.stage_file(names.RECURRENCE) if self.shape.recurrent is not None else None

    @property
    def capacity(self) -> int:
        """Rows of a cache."""
        return self.context + self.row_group - 1 + self.spare_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head: what drafts from the target's hidden states, as a stage on the target's device.

    Attributes:
        kind: how it drafts, and the name of the method that uses it ("medusa").
        vocabulary: over which tokens, and by what: "shared" (the target's LM head), "own", "low-rank", "reduced".
        num_tokens: how many tokens it can name.
        read_share: weights that a run reads, over those of a pass of the target; a matrix that serves several guesses
            in turn counts each time. 0 where an older export did not count.
    """

    kind: str
    file: str
    source: SourceModel
    shape: HeadShape
    vocabulary: str
    num_tokens: int
    read_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBucket:
    """A static shape to compile: at most `rows` rows and `tips` tip rows in one pass."""

    rows: int
    tips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Where a token embedding `[num_rows, width]` lies in a file of the bundle, and in which numbers.

    Attributes:
        dtype: of the numbers, or of the scales where they are blocks of integers.
        bits: of an integer; 0 for a table of `dtype`. The middle level stands for zero.
        block_size: integers of a row that share a scale.
        scales_offset: where the scales begin, of each row's blocks.
        factors_offset: where float32 factors of the columns begin, if there are some; the integers then have a sign,
            and one scale a row.
    """

    file: str
    num_rows: int
    width: int
    dtype: str
    offset: int
    bits: int = 0
    block_size: int = 0
    scales_offset: int = 0
    factors_offset: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of a row of integers; the last one may be longer than the row."""
        return -(-self.width // self.block_size)

    def ends(self) -> dict[str, int]:
        """Bytes from the file's start to the end of each part, by its name."""
        item = _ITEM_BYTES.get(self.dtype, 1)
        if not self.bits:
            return {"rows": self.offset + self.num_rows * self.width * item}
        levels = self.num_rows * self.num_blocks * self.block_size * self.bits // 8
        ends = {"rows": self.offset + levels, "scales": self.scales_offset + self.num_rows * self.num_blocks * item}
        if self.factors_offset is not None:
            ends["factors"] = self.factors_offset + self.width * 4
        return ends


IN_BLOCKS, IN_ROWS = "int4-blocks", "int8-rows"
FOR_PROCESSORS = (IN_ROWS, IN_BLOCKS)
"""The precisions of drafts that ONNX Runtime runs on a processor: blocks of weights, or products of integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEntry:
    """The draft: one OpenVINO IR with symbolic `N`, `R`, `C`, made static per bucket and capacity at load.

    A draft for processors is an ONNX graph instead, which ONNX Runtime runs. `embedding` is the target's,
    where the draft has none of its own.
    """

    source: SourceModel
    shape: DraftShape
    precision: str
    num_stream_layers: int
    file: str
    buckets: tuple[DraftBucket, ...]
    capacities: tuple[int, ...]
    embedding: TokenTable | None = None

    @property
    def weights_file(self) -> str:
        """The file beside `file` that the weights are read from."""
        return f"{self.file.rpartition('.')[0]}.bin"

    @property
    def is_for_processors(self) -> bool:
        """Whether ONNX Runtime runs it, on a processor."""
        return self.precision in FOR_PROCESSORS


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAccuracy:
    """What compressing the draft's weights cost, on text that nothing was calibrated on.

    An export, which judges the draft before there is a target, measures on the calibration text; compressing the draft
    of a bundle measures on text that its target writes.

    Attributes:
        scheme: how: "int8", "int4-g128", "int4-g-1-data" (group size, and whether data chose the roundings).
        agreement: share of `num_positions` where the best token is that of the fp32 draft: main row, then streams.
        accepted_before: mean tokens of a window that the text goes on with, drafted in fp32; one window per token.
        accepted_after: the same, drafted with the compressed weights.
        share_interval: bounds at 95 % of the share of the accepted length that is left; None where it was not measured.
    """

    scheme: str
    agreement: tuple[float, ...]
    accepted_before: float
    accepted_after: float
    num_windows: int
    num_positions: int
    share_interval: tuple[float, float] | None = None

    @property
    def accepted_share(self) -> float:
        """What is left of the accepted length; 1 where there was none."""
        return self.accepted_after / self.accepted_before if self.accepted_before else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedLength:
    """How good the draft is, as it is in the bundle, on texts that the target writes.

    Attributes:
        accepted: mean tokens of a window that the text goes on with, as `graphs.draft_windows` drafts them.
        num_windows: one after every token of a text, behind its prompt.
        num_prompt: tokens that begin each text.
        texts: ids of each, its prompt included.
    """

    accepted: float
    num_windows: int
    num_prompt: int
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """Special tokens. `eos_ids` end a text; `bos_id` is None where the tokenizer has none."""

    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """How one exported part, in float32 arithmetic, compares with PyTorch and the same rounded weights.

    Attributes:
        max_abs_error: of a logit, a log-probability or a hidden value.
        top1_agreement: share of `positions` rows of `text` where the best token is the same.
        max_relative_error: in standard deviations of what PyTorch says at that row.
        mean_divergence: of the two distributions, in nats.
    """

    stage: str
    max_abs_error: float
    top1_agreement: float
    positions: int
    text: str
    max_relative_error: float = 0.0
    mean_divergence: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityEntry:
    """The exported target against its fp32 model on `text`: perplexities, and the share of equal best tokens.

    `text` says which: "given", "calibration.txt" (beside the checkpoint's weights) or "built-in". `mean_divergence` is
    in nats, over the fp32 model's likeliest tokens and all others as one.
    """

    text: str
    positions: int
    perplexity: float
    reference_perplexity: float
    top1_agreement: float
    mean_divergence: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The whole document.

    `generation` holds the checkpoint's own defaults (temperature, top_k, ...), `chat` those of a chat with it, and
    where they came from; None where it has no chat template, or where an older export did not say.
    """

    schema: int
    target: TargetEntry
    draft: DraftEntry
    tokens: TokenEntry
    verify: tuple[VerifyResult, ...]
    versions: dict[str, str]
    files: dict[str, FileEntry]
    draft_accuracy: DraftAccuracy | None = None
    accepted_length: AcceptedLength | None = None
    quality: QualityEntry | None = None
    exit_coverage: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    heads: tuple[Head, ...] = ()
    chat: ChatDefaults | None = None

    @property
    def chat_defaults(self) -> ChatDefaults:
        """How a chat with this model is sampled where its reader leaves that open."""
        return self.chat or chat_defaults(self.target.source.family, self.generation)

    def chat_settings(self, temperature: float | None) -> dict[str, Any]:
        """What a chat's request takes for the fields that it leaves open.

        One that names a temperature says itself how it is sampled: it takes no more than the checkpoint's own.
        """
        return self.chat_defaults.generation if temperature is None else self.generation

    def to_json(self) -> str:
        """The document and its checksum as indented JSON with a newline at the end."""
        return json.dumps(with_checksum(asdict(self)), indent=2, sort_keys=False) + "\n"

    def used_files(self) -> tuple[str, ...]:
        """Bundle paths without which nothing can be loaded: the stages, their weights, the tokenizer."""
        target = self.target
        stages = [segment.file for segment in target.segments] + [point.file for point in target.exits]
        stages += [head.file for head in self.heads]
        stages += [target.recurrence_file] if target.recurrence_file is not None else []
        return (*stages, target.weights_file, self.draft.file, self.draft.weights_file, names.TOKENIZER_FILE)


def with_checksum(document: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's document with the SHA-256 of all its other fields, in their order-free compact form, in front."""
    rest = {name: value for name, value in document.items() if name != CHECKSUM}
    content = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {CHECKSUM: hashlib.sha256(content.encode()).hexdigest(), **rest}
