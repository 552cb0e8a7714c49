"""Recurrent layers in the graphs: their two operators, a segment's pass over them, and the stage that runs them again.

Owns: how a recurrence is written, and that both stages write it alike. Does not own: what rows give to it
(`families/gated_delta.py`), the layers around it, which are HF's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mirrorsd.families.decoder_parts import DecoderParts
from mirrorsd.families.gated_delta import Fed, GatedDelta
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import StageContract

State = tuple[Tensor, Tensor]
"""Rows before a pass that the convolution reads `[1, K - 1, channels]`, matrices `[1, heads, dk, dv]`."""


@dataclass(slots=True)
class SegmentStates:
    """States of one segment's recurrent layers, by absolute layer number, before and after a pass.

    Only the first `num_rows` `[1]` rows of the pass count. `fed` is what they gave to the recurrence.
    """

    past: dict[int, State]
    num_rows: Tensor | None
    present: dict[int, State] = field(default_factory=dict)
    fed: dict[int, Fed] = field(default_factory=dict)


class RecurrenceStage(nn.Module):
    """Every layer's recurrence over rows that a pass fed to it; see `recurrence_contract`."""

    def __init__(self, parts: DecoderParts, contract: StageContract) -> None:
        super().__init__()
        self.input_names = [spec.name for spec in contract.inputs]
        self.mixers = parts.mixers
        self.convolutions = nn.ModuleList(mixer.module.conv1d for mixer in parts.mixers.values())

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the states after the rows, in the contract's order."""
        by_name = dict(zip(self.input_names, inputs, strict=True))
        found: list[Tensor] = []
        for layer, mixer in self.mixers.items():
            fed = Fed(*(by_name[name(layer)] for name in (names.fed_conv, names.fed_decay, names.fed_rate)))
            state = by_name[names.past_conv(layer)], by_name[names.past_state(layer)]
            found += recur(mixer, fed, state)[1]
        return tuple(found)


@contextmanager
def recurrent_layers(mixers: Mapping[int, GatedDelta]) -> Iterator[None]:
    """Have HF's layers call the operators instead of their own recurrence."""
    for mixer in mixers.values():
        mixer.module.forward = partial(_mix, mixer)
    try:
        yield
    finally:
        for mixer in mixers.values():
            del mixer.module.forward


def _mix(mixer: GatedDelta, hidden_states: Tensor, *, states: SegmentStates, **_: Any) -> Tensor:
    """What HF's module does, over the states of a segment."""
    layer = int(mixer.module.layer_idx)
    given, gate = mixer.feed(hidden_states)
    assert states.num_rows is not None  # a segment with such a layer has the input
    counts = (torch.arange(hidden_states.shape[1]) < states.num_rows)[None, :, None].to(hidden_states.dtype)
    fed = Fed(given.conv, given.decay * counts, given.rate * counts)
    past = states.past[layer]
    answer, after = recur(mixer, fed, past)
    states.present[layer] = last_rows(past[0], fed.conv, states.num_rows), after[1]
    states.fed[layer] = fed
    return mixer.finish(answer, gate)


def last_rows(before: Tensor, rows: Tensor, num_rows: Tensor) -> Tensor:
    """What the convolution reads next: `before` `[1, K - 1, C]`, moved on by the first `num_rows` of `rows`."""
    both = torch.cat((before, rows), dim=1)
    places = torch.arange(before.shape[1]) + num_rows
    if not torch.onnx.is_in_onnx_export():
        return both.index_select(1, places)
    moved: Tensor = torch.onnx.ops.symbolic("Gather", (both, places), {"axis": 1}, dtype=both.dtype, shape=before.shape)
    return moved


def recur(mixer: GatedDelta, fed: Fed, past: State) -> tuple[Tensor, State]:
    """Run convolution and recurrence over rows: `com.microsoft::CausalConvWithState` and `::LinearAttention`.

    Returns:
        The answer `[1, S, value width]`, and the state after all rows.
    """
    num_rows = fed.conv.shape[1]
    convolved, conv = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::CausalConvWithState",
        (fed.conv, mixer.kernel, None, past[0]),
        {"activation": mixer.fused_activation, "channels_last": 1},
        dtypes=(fed.conv.dtype,) * 2,
        shapes=(fed.conv.shape, past[0].shape),
        version=1,
    )
    query, key, value = mixer.split(convolved)
    answer, state = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        (query, key, value, past[1], fed.decay, fed.rate),
        {
            "q_num_heads": mixer.num_key_heads,
            "kv_num_heads": mixer.num_value_heads,
            "update_rule": "gated_delta",
        },
        dtypes=(value.dtype,) * 2,
        shapes=((1, num_rows, value.shape[2]), past[1].shape),
        version=1,
    )
    return answer, (conv, state)
