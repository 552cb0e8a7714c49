"""What every stage takes and gives. The exporter proves it, the runtime relies on it.

Rows `S`, capacity `C`, hidden `H`, vocabulary `V`, logit rows `R`, exit candidates `K` for the target;
rows `N`, tip rows `R`, capacity `C`, streams `s`, candidates `m` for the draft;
rows `R`, guesses `K`, candidates `m` for a drafting head (see docs, "Stages").
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mirrorsd.graphs import names

Dim = int | str
MOST_STATES = 10
"""Of one conversation: the two that passes read and write, and eight snapshots, whatever the text's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output: numpy dtype name and shape; a string is a symbolic dimension."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContract:
    """Inputs and outputs of one stage, in order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """The layers of a target that keep a state of fixed size in place of keys and values, and its sizes.

    Attributes:
        layers: which layers they are, by absolute layer number.
        channels: width of the rows that the convolution in front of the recurrence reads.
        conv_rows: rows before its own that it reads.
        num_heads: heads of the recurrence; each has a decay and a rate per row. 0 where the convolution is all there
            is, and the rows that it reads are the whole state.
        num_key_heads: heads of queries and of keys; each serves several of the others.
        key_dim: rows of a head's state.
        value_dim: columns of a head's state.
    """

    layers: tuple[int, ...]
    channels: int
    conv_rows: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """The sizes of a target that its contracts depend on.

    `dtype` is the name of what hidden states and caches are made of (`float32`, `float16`, `bfloat16`). Layers that
    are not among the `recurrent` ones have keys and values. Layers that are mixtures have `num_experts`, of which a row
    is given to `num_active`; 0 where no layer is one.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    recurrent: RecurrentShape | None = None
    num_experts: int = 0
    num_active: int = 0

    @property
    def kept_on_processor(self) -> str:
        """What ONNX Runtime computes on the processor only, or was only tried there; empty where nothing is."""
        return "recurrent layers" if self.recurrent is not None else "mixtures of experts" if self.num_experts else ""

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that have a state."""
        return self.recurrent.layers if self.recurrent is not None else ()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.recurrent_layers)

    @property
    def state_bytes(self) -> int:
        """Size of the state of all layers together."""
        if (sizes := self.recurrent) is None:
            return 0
        numbers = sizes.conv_rows * sizes.channels + sizes.num_heads * sizes.key_dim * sizes.value_dim
        return len(sizes.layers) * numbers * self.bytes_per_number

    @property
    def logits_dtype(self) -> str:
        """What logits are made of: the stages' own kind, float32 where numpy has no such kind."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    @property
    def bytes_per_number(self) -> int:
        """Size of a number of a cache or a hidden state."""
        return 4 if self.dtype == "float32" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The sizes of a draft that its contract depends on; `num_streams = 0` is an ordinary causal LM.

    `num_noise_rows = 0`: candidates are ranked without the noise of sampling. `row_width = 0`: the graph looks ids up
    in an embedding of its own; else the host does, in the target's, whose rows are so wide.
    """

    num_layers: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    num_streams: int
    num_candidates: int
    dtype: str = "float32"
    num_noise_rows: int = 0
    row_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The sizes of a head, which drafts from the target's hidden states, that its contract depends on.

    Attributes:
        taps: the hidden states that it reads, those after so many layers; one more than the target has: behind its
            final norm.
        length: tokens that it guesses in one run.
        num_candidates: tokens that it names for each of them.
        num_layers: its layers that keep a cache; 0 where it reads nothing but the last row.
        num_kv_heads: key heads of these layers; 0 without layers.
        head_dim: width of a key; 0 without layers.
    """

    taps: tuple[int, ...]
    length: int
    num_candidates: int
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0


def segment_contract(
    shape: TargetShape, name: str, *, first_layer: int, end_layer: int, taps: Iterable[int] = ()
) -> StageContract:
    """Contract of the segment that runs layers `first_layer .. end_layer - 1`.

    Of the target's `taps` (see `HeadShape.taps`) it gives those behind its layers. One at the border to the next
    segment is `hidden` or `next_hidden` itself.

    The first segment takes `input_ids`, later ones `hidden`. The last one gives logits, the first `hidden`, and one
    between them `next_hidden` (ONNX forbids an output named like an input).
    `seqlens_k[1]` is the number of cached rows after this pass, spare ones (`TargetEntry`) included, minus one;
    `total_length` is that number.
    Caches are share-buffer: `past_*` and `present_*` are one buffer of capacity `C`.

    A recurrent layer takes `past_conv` and `past_state` and gives those after the first `num_rows[1]` rows: what stands
    behind them fills a pass up. `fed_*` are what the pass's rows gave to the recurrence: see `recurrence_contract`.
    Where a layer has a convolution alone, there are `*_conv` alone.
    """
    is_first, is_last = first_layer == 0, end_layer == shape.num_layers
    hidden = TensorSpec(name=names.HIDDEN, dtype=shape.dtype, shape=(1, "S", shape.hidden_size))
    hidden_after = hidden if is_first else replace(hidden, name=names.NEXT_HIDDEN)
    inputs = [TensorSpec(name=names.INPUT_IDS, dtype="int64", shape=(1, "S")) if is_first else hidden]
    if is_last:
        inputs.append(TensorSpec(name=names.LOGIT_ROWS, dtype="int64", shape=("R",)))
    inputs.append(TensorSpec(name=names.SEQLENS_K, dtype="int32", shape=(1,)))
    inputs.append(TensorSpec(name=names.TOTAL_LENGTH, dtype="int32", shape=()))
    layers = [layer for layer in shape.attention_layers if first_layer <= layer < end_layer]
    recurrent = [layer for layer in shape.recurrent_layers if first_layer <= layer < end_layer]
    if recurrent:
        inputs.append(TensorSpec(name=names.NUM_ROWS, dtype="int64", shape=(1,)))
    cache = (1, shape.num_kv_heads, "C", shape.head_dim)
    inputs += _per_layer(layers, names.past_key, names.past_value, shape.dtype, cache)
    inputs += state_specs(shape, recurrent, names.past_conv, names.past_state)
    outputs = list(_logit_outputs(shape)) if is_last else [hidden_after]
    outputs += [
        replace(hidden, name=names.tap(layer))
        for layer in taps
        if first_layer < layer < end_layer or (is_last and layer in (end_layer, end_layer + 1))
    ]
    outputs += _per_layer(layers, names.present_key, names.present_value, shape.dtype, cache)
    outputs += state_specs(shape, recurrent, names.present_conv, names.present_state)
    outputs += fed_specs(shape, recurrent)
    return StageContract(name=name, inputs=tuple(inputs), outputs=tuple(outputs))


def recurrence_contract(shape: TargetShape) -> StageContract:
    """Contract of the stage that runs every layer's recurrence again, over the first `S` rows that a pass fed to it.

    A state cannot be cut: after a pass whose last rows were rejected, the accepted ones are run from the state before
    it. `fed_conv` are the rows that the convolution read, `fed_key` and `fed_value` what it made of them, `fed_decay`
    the logs of what each head's state is multiplied with, `fed_rate` how far each head follows a row.
    """
    layers = shape.recurrent_layers
    return StageContract(
        name=names.RECURRENCE,
        inputs=(*fed_specs(shape, layers), *state_specs(shape, layers, names.past_conv, names.past_state)),
        outputs=tuple(state_specs(shape, layers, names.present_conv, names.present_state)),
    )


def state_specs(
    shape: TargetShape, layers: Iterable[int], conv_name: Callable[[int], str], state_name: Callable[[int], str]
) -> list[TensorSpec]:
    """The states of recurrent layers: the last rows of the convolution, then the recurrence's matrices."""
    sizes = shape.recurrent
    if sizes is None:
        return []
    kept: list[tuple[Callable[[int], str], tuple[Dim, ...]]] = [(conv_name, (1, sizes.conv_rows, sizes.channels))]
    if sizes.num_heads:
        kept.append((state_name, (1, sizes.num_heads, sizes.key_dim, sizes.value_dim)))
    return [TensorSpec(name=name(layer), dtype=shape.dtype, shape=dims) for layer in layers for name, dims in kept]


def fed_specs(shape: TargetShape, layers: Iterable[int]) -> list[TensorSpec]:
    """What the rows of a pass give to the recurrence of each layer."""
    sizes = shape.recurrent
    if sizes is None:
        return []
    key_width, value_width = sizes.num_key_heads * sizes.key_dim, sizes.num_heads * sizes.value_dim
    widths = (sizes.channels, key_width, value_width, sizes.num_heads, sizes.num_heads)
    fed = list(zip(names.FED_NAMES, widths, strict=True)) if sizes.num_heads else [(names.fed_conv, sizes.channels)]
    return [
        TensorSpec(name=name(layer), dtype=shape.dtype, shape=(1, "S", width))
        for layer in layers
        for name, width in fed
    ]


def _logit_outputs(shape: TargetShape) -> tuple[TensorSpec, ...]:
    """`argmax_gap` is the distance between the best and the second logit: small means a near tie."""
    return (
        TensorSpec(name=names.LOGITS, dtype=shape.logits_dtype, shape=(1, "R", shape.vocab_size)),
        TensorSpec(name=names.ARGMAX_IDS, dtype="int64", shape=(1, "R")),
        TensorSpec(name=names.ARGMAX_GAP, dtype="float32", shape=(1, "R")),
    )


def _per_layer(layers, key_name, value_name, dtype, shape) -> list[TensorSpec]:  # type: ignore[no-untyped-def]
    specs = []
    for layer in layers:
        specs.append(TensorSpec(name=key_name(layer), dtype=dtype, shape=shape))
        specs.append(TensorSpec(name=value_name(layer), dtype=dtype, shape=shape))
    return specs


def exit_contract(shape: TargetShape, name: str, *, num_candidates: int) -> StageContract:
    """Contract of an exit: the top-`K` ids and log-probabilities at every row, best first."""
    top_k = (1, "S", num_candidates)
    return StageContract(
        name=name,
        inputs=(TensorSpec(name=names.HIDDEN, dtype=shape.dtype, shape=(1, "S", shape.hidden_size)),),
        outputs=(
            TensorSpec(name=names.EXIT_IDS, dtype="int64", shape=top_k),
            TensorSpec(name=names.EXIT_LOGPROBS, dtype="float32", shape=top_k),
        ),
    )


def _token_row_input(shape: DraftShape) -> tuple[TensorSpec, ...]:
    if not shape.row_width:
        return ()
    return (TensorSpec(name=names.DRAFT_TOKEN_ROWS, dtype="float32", shape=(1, "N", shape.row_width)),)


def _noise_inputs(shape: DraftShape) -> tuple[TensorSpec, ...]:
    if not shape.num_noise_rows:
        return ()
    return (
        TensorSpec(name=names.DRAFT_NOISE, dtype="float32", shape=(shape.num_noise_rows, shape.vocab_size)),
        TensorSpec(name=names.DRAFT_NOISE_ROWS, dtype="int64", shape=("R", 1 + shape.num_streams)),
    )


def draft_contract(shape: DraftShape) -> StageContract:
    """Contract of one draft pass over `N` rows with `R` tip rows (Speculative Streaming, arXiv 2402.11131).

    `mask` is added to the attention scores: column `k < C` is cache slot `k`, column `C + r` is row `r` of this pass;
    0 lets a row see it, `MASKED` hides it. `tip_rows` index the rows of this pass. Output `[r, 0]` is the
    main prediction of tip `r` (the next token), `[r, j]` that of stream `j` (the token `j` further on), each the
    best `m` ids with their log-probabilities, best first. With `noise`, a row per position, the best are those of
    log-probability plus row `noise_rows[r, j]`: what wins a Gumbel-argmax may be any token. `new_*` are the rows' own
    keys and values: the host writes those it wants to keep into the cache. Streams leave nothing behind. `token_rows`,
    of a draft that shares its target's embedding, are what the host has looked up for `ids` there.
    """
    layers = range(shape.num_layers)
    cache = (1, shape.num_kv_heads, "C", shape.head_dim)
    new = (1, shape.num_kv_heads, "N", shape.head_dim)
    tips = ("R", 1 + shape.num_streams, shape.num_candidates)
    inputs = (
        TensorSpec(name=names.DRAFT_IDS, dtype="int64", shape=(1, "N")),
        *_token_row_input(shape),
        TensorSpec(name=names.DRAFT_POSITIONS, dtype="int64", shape=(1, "N")),
        TensorSpec(name=names.DRAFT_MASK, dtype="float32", shape=(1, 1, "N", "C+N")),
        TensorSpec(name=names.DRAFT_TIP_ROWS, dtype="int64", shape=("R",)),
        *_noise_inputs(shape),
        *_per_layer(layers, names.past_key, names.past_value, shape.dtype, cache),
    )
    outputs = (
        TensorSpec(name=names.DRAFT_TIP_IDS, dtype="int64", shape=tips),
        TensorSpec(name=names.DRAFT_TIP_LOGPROBS, dtype="float32", shape=tips),
        *_per_layer(layers, names.new_key, names.new_value, shape.dtype, new),
    )
    return StageContract(name="draft", inputs=inputs, outputs=outputs)


def head_contract(target: TargetShape, shape: HeadShape, name: str) -> StageContract:
    """Contract of a head's run over the first `R` rows of the target's last pass, which had `S`.

    `tap.*` are that pass's own outputs, never copied. `tokens[r]` is the token that follows row `r`, so that the last
    one is the text's next head token. `start[0]` rows were read before; caches are share-buffer, and rolled back by
    that number. `ids[k, 0]` is the guess at what follows the head token and the `k` guesses before; the others are its
    runners-up, best first by logits plus row `k` of `noise`, which is zeros where a text is not sampled. The `K`
    guesses are one chain, made in one run.
    """
    layers = range(shape.num_layers)
    cache = (1, shape.num_kv_heads, "C", shape.head_dim)
    taps = (
        TensorSpec(name=names.tap(layer), dtype=target.dtype, shape=(1, "S", target.hidden_size))
        for layer in shape.taps
    )
    inputs = (
        *taps,
        TensorSpec(name=names.HEAD_TOKENS, dtype="int64", shape=(1, "R")),
        TensorSpec(name=names.HEAD_START, dtype="int64", shape=(1,)),
        TensorSpec(name=names.HEAD_NOISE, dtype="float32", shape=(shape.length, target.vocab_size)),
        *_per_layer(layers, names.past_key, names.past_value, target.dtype, cache),
    )
    outputs = (
        TensorSpec(name=names.HEAD_IDS, dtype="int64", shape=(shape.length, shape.num_candidates)),
        TensorSpec(name=names.HEAD_LOGPROBS, dtype="float32", shape=(shape.length, shape.num_candidates)),
        *_per_layer(layers, names.present_key, names.present_value, target.dtype, cache),
    )
    return StageContract(name=name, inputs=inputs, outputs=outputs)


MASKED = -30000.0
"""Score added where a draft row may not look: far below any real score, still finite in fp16."""
