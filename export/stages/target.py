"""The target's stages as PyTorch modules around Hugging Face's own layers: segments and exits.

Owns: which HF modules a stage is made of, and its inputs and outputs in the order of the contract.
Does not own: attention (`attention.py`), ONNX, weights on disk.
"""

import torch
from torch import Tensor, nn

from mirrorsd.export.stages.attention import SharedCache
from mirrorsd.export.stages.layer import ANY, Layer, flowing_inputs, layer_contract, layer_inputs, of_layer, of_stage
from mirrorsd.export.stages.recurrence import LayerState, recurrent
from mirrorsd.export.stages.rotary_tables import RotaryTables
from mirrorsd.families.decoder_parts import DecoderParts, Mixer
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import StageContract


class LogitHead(nn.Module):
    """Final norm and LM head, written as one `Gemm(transB=1)` so that a tied embedding `[V, H]` is read in place.

    With `num_rescored` the logits of so many best tokens of a row are computed again: `rescored`.
    """

    def __init__(self, parts: DecoderParts, num_rescored: int = 0) -> None:
        super().__init__()
        self.num_rescored = num_rescored
        self.norm = parts.norm
        self.linear = parts.lm_head
        self.scale = parts.logit_scale

    def forward(self, hidden: Tensor) -> Tensor:
        """Turn `hidden` `[1, rows, H]` into logits `[1, rows, V]`."""
        return self.scale(self.product(self.norm(hidden)))

    def product(self, hidden: Tensor) -> Tensor:
        """Multiply with the head's weight."""
        rows = hidden.squeeze(0)
        logits = product_in_place(rows, self.linear.weight, self.linear.bias)
        if self.num_rescored:
            logits = rescored(logits, rows, self.linear.weight, self.num_rescored)
        return logits.unsqueeze(0)


def rescored(logits: Tensor, hidden: Tensor, table: Tensor, num_best: int) -> Tensor:
    """Compute the logits of each row's best tokens again, as products of `hidden` `[..., H]` with rows of `table`.

    The table `[V, H]` is held in more bits than the weights that all `logits` `[..., V]` are from; few rows are read.
    """
    ids = torch.topk(logits, min(num_best, logits.shape[-1]), sorted=False).indices
    rows = torch.nn.functional.embedding(ids, table)
    return logits.scatter(-1, ids, (rows @ hidden[..., None]).squeeze(-1))


def product_in_place(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows `[n, H]` times a weight `[V, H]`, which is stored as it lies; for a MatMul it would be turned."""
    if not torch.onnx.is_in_onnx_export():
        return torch.nn.functional.linear(rows, weight, bias)
    inputs = (rows, weight) if bias is None else (rows, weight, bias)
    shape = (rows.shape[0], weight.shape[0])
    logits: Tensor = torch.onnx.ops.symbolic("Gemm", inputs, {"transB": 1}, dtype=rows.dtype, shape=shape)
    return logits


class TargetLayer(nn.Module):
    """A layer of the target with its cache, or with its state if a `mixer` stands in place of attention."""

    def __init__(self, layer: nn.Module, contract: StageContract, context: int, mixer: Mixer | None) -> None:
        super().__init__()
        self.input_names = [spec.name for spec in contract.inputs]
        self.layer, self.mixer, self.context = layer, mixer, context

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the layer; inputs and outputs are those of `layer_contract`, in its order."""
        given = dict(zip(self.input_names, inputs, strict=True))
        flowing = layer_inputs(given)
        if self.mixer is None:
            lengths = given[names.SEQLENS_K], given[names.TOTAL_LENGTH]
            cache = SharedCache((given[names.past_key(ANY)], given[names.past_value(ANY)]), *lengths, self.context)
            return (self.layer(**flowing, stage_cache=cache), *cache.present)
        past = tuple(given[name] for name in (names.past_conv(ANY), names.past_state(ANY)) if name in given)
        state = LayerState(past, given[names.NUM_ROWS])
        with recurrent(self.mixer):
            hidden = self.layer(**flowing, stage_cache=state)
        return (hidden, *state.present, *state.fed)


class SegmentStage(nn.Module):
    """Layers `first_layer .. end_layer - 1` of the target, with the embedding or the LM head at the ends."""

    def __init__(
        self,
        parts: DecoderParts,
        contract: StageContract,
        *,
        first_layer: int,
        end_layer: int,
        context: int,
        capacity: int,
        spare_rows: int,
        num_rescored: int = 0,
    ) -> None:
        super().__init__()
        self.input_names = [spec.name for spec in contract.inputs]
        self.output_names = [spec.name for spec in contract.outputs]
        self.first_layer, self.end_layer = first_layer, end_layer
        self.context, self.spare_rows = context, spare_rows
        numbers = range(first_layer, end_layer)
        self.recurrent = [number for number in numbers if number in parts.mixers]
        self.rotary = RotaryTables(parts, numbers, context, parts.lm_head.weight.dtype, capacity - context)
        self.layers = [self._layer(parts, contract, number) for number in numbers]
        if first_layer == 0:
            self.embed = parts.embed
        if end_layer == len(parts.layers):
            self.head = LogitHead(parts, num_rescored)

    def _layer(self, parts: DecoderParts, stage: StageContract, number: int) -> Layer:
        is_recurrent = number in self.recurrent
        more = (names.NUM_ROWS,) if is_recurrent else (names.SEQLENS_K, names.TOTAL_LENGTH)
        lengths = tuple(spec for spec in stage.inputs if spec.name in more)
        contract = layer_contract(stage, number, "S", parts.hidden_size, self.rotary.width_of(number), lengths)
        module = TargetLayer(parts.layers[number], contract, self.context, parts.mixers.get(number))
        return Layer(module, contract, f"layers.{number - self.first_layer}.")

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the segment; inputs and outputs are those of `segment_contract`, in its order."""
        by_name = dict(zip(self.input_names, inputs, strict=True))
        seqlens_k = by_name[names.SEQLENS_K]
        flowing = by_name[names.INPUT_IDS if self.first_layer == 0 else names.HIDDEN]
        numbers = range(self.first_layer, self.end_layer)
        rows = torch.arange(flowing.shape[1])[None]
        positions = rows + (seqlens_k.to(torch.int64) + 1 - self.spare_rows - flowing.shape[1])[:, None]
        hidden = self.embed(flowing, positions) if self.first_layer == 0 else flowing
        angles = self.rotary(positions)
        tapped: list[Tensor] = []
        kept: dict[str, Tensor] = {}
        for number, layer in zip(numbers, self.layers, strict=True):
            found = layer(by_name | of_layer(by_name, number) | flowing_inputs(hidden, positions, angles[number]))
            hidden = found.pop(names.NEXT_HIDDEN)
            kept |= of_stage(found, number)
            if number + 1 < self.end_layer and names.tap(number + 1) in self.output_names:
                tapped.append(hidden)
        present = tuple(kept[name] for name in self.output_names if name in kept)
        if not hasattr(self, "head"):
            return (hidden, *tapped, *present)
        rows = by_name[names.LOGIT_ROWS]
        if names.tap(self.end_layer) in self.output_names:
            tapped.append(hidden)
        if names.tap(self.end_layer + 1) not in self.output_names:
            return (*self.choose(self.head(take_rows(hidden, rows))), *tapped, *present)
        normed = self.head.norm(hidden)
        logits = self.head.scale(self.head.product(take_rows(normed, rows)))
        return (*self.choose(logits), *tapped, normed, *present)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[1, R, V]`, the best id `[1, R]` and its lead over the second `[1, R]` (float32)."""
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        best = torch.topk(logits, 2).values.float()
        # Not the ids beside these values: providers that do not slice 64-bit numbers would leave that to the processor.
        return logits, logits.argmax(dim=-1), best[..., 0] - best[..., 1]


def take_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """Rows `[1, R, H]` of `hidden` `[1, S, H]`: one `Gather`, without the `Reshape` that torch adds for its indices."""
    if not torch.onnx.is_in_onnx_export():
        selected: Tensor = hidden.index_select(1, rows)
        return selected
    shape = (1, rows.shape[0], hidden.shape[2])
    taken: Tensor = torch.onnx.ops.symbolic("Gather", (hidden, rows), {"axis": 1}, dtype=hidden.dtype, shape=shape)
    return taken


class ExitStage(nn.Module):
    """An exit: optional low-rank residual adapter, the target's final norm and LM head, top-K log-probabilities."""

    def __init__(self, parts: DecoderParts, num_candidates: int, adapter: tuple[Tensor, Tensor] | None) -> None:
        """Build from the target's parts; `adapter` is (down `[rank, H]`, up `[H, rank]`) or None."""
        super().__init__()
        self.head = LogitHead(parts)
        self.num_candidates = num_candidates
        if adapter is not None:
            self.down, self.up = (
                nn.Parameter(part.to(parts.lm_head.weight.dtype), requires_grad=False) for part in adapter
            )

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and float32 log-probabilities `[1, S, K]`, best first, for `hidden` `[1, S, H]`."""
        logits = self.logits(inputs[0])
        best, ids = torch.topk(logits, self.num_candidates)
        return ids, best - torch.logsumexp(logits, dim=-1, keepdim=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all float32 logits `[1, S, V]`."""
        if hasattr(self, "down"):
            low_rank = torch.nn.functional.linear(hidden, self.down)
            hidden = hidden + torch.nn.functional.linear(low_rank, self.up)
        logits: Tensor = self.head(hidden).float()
        return logits
