"""The draft's pass as a PyTorch module around Hugging Face's own layers: rows, tips and streams.

Owns: how streams enter, what they see, and what the pass returns (Speculative Streaming, arXiv 2402.11131).
Does not own: attention (`attention.py`), conversion to OpenVINO (`draft_ir.py`).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from mirrorsd.export.checkpoints.loading import Streams
from mirrorsd.export.stages.attention import TreeCache
from mirrorsd.export.stages.layer import ANY, Layer, flowing_inputs, layer_contract, layer_inputs, of_layer, of_stage
from mirrorsd.export.stages.rotary_tables import RotaryTables
from mirrorsd.export.stages.top_candidates import top_candidates
from mirrorsd.families.decoder_parts import DecoderParts
from mirrorsd.families.stream_adapter import adapt_streams
from mirrorsd.families.stream_link import SHORTLIST, Guesses, LinkWeights, follow_links
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MASKED, DraftShape, StageContract, TensorSpec


class DraftLayer(nn.Module):
    """A layer of the draft with its cache."""

    def __init__(self, layer: nn.Module, contract: StageContract) -> None:
        super().__init__()
        self.input_names = [spec.name for spec in contract.inputs]
        self.layer = layer

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the layer; inputs and outputs are those of `layer_contract`, in its order."""
        given = dict(zip(self.input_names, inputs, strict=True))
        cache = TreeCache((given[names.past_key(ANY)], given[names.past_value(ANY)]), given[names.DRAFT_MASK])
        return (self.layer(**layer_inputs(given), stage_cache=cache), *cache.new)


class DraftStage(nn.Module):
    """One pass over `N` rows that predicts at `R` tip rows, `1 + s` tokens each.

    Main rows run through all layers as the checkpoint does. Stream `j` of a tip enters at layer
    `num_layers - num_stream_layers` as the tip's hidden state plus `P_j`, at the tip's position plus `j`; before
    each of its layers and behind the last it passes its adapters, if there are any, and behind the norm its link.
    """

    def __init__(
        self,
        parts: DecoderParts,
        contract: StageContract,
        shape: DraftShape,
        *,
        streams: Streams | None,
        context: int,
        num_input_ids: int,
    ) -> None:
        """Build from the parts of HF's causal LM; `streams` is None for an ordinary draft.

        The target may feed ids `0 .. num_input_ids - 1`; those that the draft lacks are read as its last one.
        """
        super().__init__()
        self.input_names = [spec.name for spec in contract.inputs]
        self.output_names = [spec.name for spec in contract.outputs]
        self.shape = shape
        self.num_input_ids = num_input_ids
        self.first_stream_layer = shape.num_layers
        self.embed = parts.embed
        self.is_tied = parts.embed.table.weight is parts.lm_head.weight
        self.norm = parts.norm
        self.lm_head = parts.lm_head
        self.logit_scale = parts.logit_scale
        dtype = parts.lm_head.weight.dtype
        self.rotary = RotaryTables(parts, range(shape.num_layers), context, dtype, shape.num_streams)
        self.num_groups = parts.num_heads // shape.num_kv_heads
        self.layers = [self._layer(parts, contract, number) for number in range(shape.num_layers)]
        if streams is not None:
            self.first_stream_layer -= streams.num_stream_layers
            self.streams = nn.Parameter(streams.embeddings.to(dtype), requires_grad=False)
            halves = [half.to(dtype) for adapter in streams.adapters for half in adapter]
            self.adapters = nn.ParameterList(nn.Parameter(half, requires_grad=False) for half in halves)
            link = [matrix.to(dtype) for matrix in streams.link or ()]
            self.link = nn.ParameterList(nn.Parameter(matrix, requires_grad=False) for matrix in link)

    def _layer(self, parts: DecoderParts, stage: StageContract, number: int) -> Layer:
        rows = "N" if self.num_groups == 1 else f"{self.num_groups}*N"
        bias = TensorSpec(name=names.DRAFT_MASK, dtype="float32", shape=(1, 1, rows, "C+N"))
        contract = layer_contract(stage, number, "N", parts.hidden_size, self.rotary.width_of(number), (bias,))
        return Layer(DraftLayer(parts.layers[number], contract), contract, f"layers.{number}.")

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the pass; inputs and outputs are those of `draft_contract`, in its order."""
        by_name = dict(zip(self.input_names, inputs, strict=True))
        positions, tip_rows = by_name[names.DRAFT_POSITIONS], by_name[names.DRAFT_TIP_ROWS]
        mask = by_name[names.DRAFT_MASK]
        ids, rows = by_name[names.DRAFT_IDS], by_name.get(names.DRAFT_TOKEN_ROWS)
        if self.lm_head.out_features < self.num_input_ids:
            ids = ids.clamp(max=self.lm_head.out_features - 1)
        hidden = self.embed(ids, positions) if rows is None else self.embed.of_rows(rows, positions)
        # Not the ids' rows: of those the exporter would not know that the hidden states have as many.
        bias, num_rows, new = self._for_groups(mask), hidden.shape[1], dict[str, Tensor]()
        angles = self.rotary(positions)
        for number, layer in enumerate(self.layers):
            if number == self.first_stream_layer:
                hidden, positions = self.add_streams(hidden, positions, tip_rows)
                angles = self.rotary(positions)
                bias = self._for_groups(stream_bias(mask, tip_rows, self.shape.num_streams))
            hidden = self.adapt(hidden, num_rows, number - self.first_stream_layer)
            flowing = flowing_inputs(hidden, positions, angles[number])
            found = layer(of_layer(by_name, number) | flowing | {names.DRAFT_MASK: bias})
            hidden = found.pop(names.NEXT_HIDDEN)
            main = slice(None) if number < self.first_stream_layer else slice(num_rows)
            new |= {name: kept[:, :, main] for name, kept in of_stage(found, number).items()}
        hidden = self.adapt(hidden, num_rows, self.shape.num_layers - self.first_stream_layer)
        noise = None
        if self.shape.num_noise_rows:
            noise = by_name[names.DRAFT_NOISE].index_select(0, by_name[names.DRAFT_NOISE_ROWS].flatten())
        if rows is not None and self.is_tied:
            own = rows[0].index_select(0, tip_rows)
        else:
            own = self.lm_head.weight.index_select(0, ids[0].index_select(0, tip_rows))
        return (*self.predict(hidden, tip_rows, own, noise), *(new[name] for name in self.output_names if name in new))

    def _for_groups(self, bias: Tensor) -> Tensor:
        return bias if self.num_groups == 1 else torch.cat([bias] * self.num_groups, dim=2)

    def add_streams(self, hidden: Tensor, positions: Tensor, tip_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Append the `R * s` stream rows (tip by tip) to hidden `[1, N, Hd]` and positions `[1, N]`.

        With s = 2 and tips 4, 7 the rows appended are 4+P1, 4+P2, 7+P1, 7+P2.
        """
        num_streams, hidden_size = self.streams.shape
        entering = hidden.index_select(1, tip_rows).unsqueeze(2) + self.streams
        ahead = positions.index_select(1, tip_rows).unsqueeze(2) + torch.arange(1, num_streams + 1)
        num_tips = tip_rows.shape[0]
        entering = entering.reshape(1, num_tips * num_streams, hidden_size)
        ahead = ahead.reshape(1, num_tips * num_streams)
        return torch.cat((hidden, entering), dim=1), torch.cat((positions, ahead), dim=1)

    def adapt(self, hidden: Tensor, num_rows: int, place: int) -> Tensor:
        """Let the streams, which stand behind `num_rows` main rows, pass their adapter of this place."""
        if place < 0 or not self.shape.num_streams or not len(self.adapters):
            return hidden
        down, up = self.adapters[2 * place], self.adapters[2 * place + 1]
        return torch.cat((hidden[:, :num_rows], adapt_streams(hidden[:, num_rows:], down, up)), dim=1)

    def predict(self, hidden: Tensor, tip_rows: Tensor, own: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the best `m` ids and log-probabilities `[R, 1+s, m]` of main and streams at every tip.

        Best are those of log-probability plus `noise [R * (1+s), V]`, where given; `own [R, H]` are the head's rows of
        the tips' tokens.
        """
        shape, num_tips = self.shape, tip_rows.shape[0]
        tips = hidden.index_select(1, tip_rows).squeeze(0).unsqueeze(1)
        if shape.num_streams:
            streams = hidden[0, hidden.shape[1] - num_tips * shape.num_streams :]
            tips = torch.cat((tips, streams.reshape(num_tips, shape.num_streams, hidden.shape[2])), dim=1)
        # Rows past the shared vocabulary are never computed: the same as masking them with -inf.
        weight = self.lm_head.weight[: shape.vocab_size]
        bias = None if self.lm_head.bias is None else self.lm_head.bias[: shape.vocab_size]
        tips = self.norm(tips)
        logits = linear(tips, weight, bias)
        noise = None if noise is None else noise.reshape(num_tips, 1 + shape.num_streams, shape.vocab_size)
        if shape.num_streams and len(self.link):
            guesses, link = Guesses(logits, noise, self.logit_scale), LinkWeights(*self.link)
            count = max(SHORTLIST, shape.num_candidates)
            ranked = follow_links(link, tips[:, 1:], guesses, weight, own, count=count, shortlist=top_candidates)
            _, places = torch.topk(ranked.scores, shape.num_candidates)
            return ranked.ids.gather(2, places), ranked.logprobs.gather(2, places)
        logits = self.logit_scale(logits).flatten(0, 1)
        best, ids = top_candidates(logits if noise is None else logits + noise.flatten(0, 1), shape.num_candidates)
        if noise is not None:
            best = torch.gather(logits, 1, ids)
        logprobs = best - torch.logsumexp(logits, dim=-1, keepdim=True)
        of_tips = (num_tips, 1 + shape.num_streams, shape.num_candidates)
        return ids.reshape(of_tips), logprobs.reshape(of_tips)


def stream_bias(mask: Tensor, tip_rows: Tensor, num_streams: int) -> Tensor:
    """Widen `mask` `[1, 1, N, C+N]` to `[1, 1, N+R*s, C+N+R*s]`: who sees what once streams are in.

    Main rows never see streams. Stream `j` of tip `r` sees what row `r` sees, row `r` itself, and streams `1..j` of it.
    With s = 2 and two tips the lower right corner is (rows and columns r1s1 r1s2 r2s1 r2s2)::

        1 . . .
        1 1 . .
        . . 1 .
        . . 1 1
    """
    num_tips, num_rows, num_columns = tip_rows.shape[0], mask.shape[2], mask.shape[3]
    num_added = num_tips * num_streams
    own_column = tip_rows + (num_columns - num_rows)
    is_own = torch.arange(num_columns)[None, :] == own_column[:, None]
    of_tips = torch.where(is_own, 0.0, mask.index_select(2, tip_rows)).unsqueeze(3)
    of_tips = of_tips.expand(1, 1, num_tips, num_streams, num_columns).reshape(1, 1, num_added, num_columns)
    tip = torch.arange(num_tips)
    is_earlier = torch.ones(num_streams, num_streams, dtype=torch.bool).tril()
    is_visible = (tip[:, None] == tip[None, :])[:, None, :, None] & is_earlier[None, :, None, :]
    among_streams = torch.where(is_visible, 0.0, MASKED).reshape(1, 1, num_added, num_added)
    upper = pad(mask, (0, num_added), value=MASKED)
    return torch.cat((upper, torch.cat((of_tips, among_streams), dim=3)), dim=2)
