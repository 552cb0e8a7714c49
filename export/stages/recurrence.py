"""Recurrent layers in the graphs: their two operators, a pass over one of them, and the stage that runs them again.

Owns: how a recurrence is written, and that both stages write it alike. Does not own: what rows give to it
(`families/gated_delta.py`, `families/short_conv.py`), the layers around it, which are HF's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mirrorsd.families.decoder_parts import DecoderParts, Mixer
from mirrorsd.families.gated_delta import Fed, GatedDelta, Given
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import StageContract

State = tuple[Tensor, ...]
"""Rows before a pass that the convolution reads `[1, K - 1, channels]`; matrices `[1, heads, dk, dv]`, if any."""


@dataclass(slots=True)
class LayerState:
    """The state of a recurrent layer, before and after a pass.

    Only the first `num_rows` `[1]` rows of the pass count. `fed` is what they gave to the recurrence.
    """

    past: State
    num_rows: Tensor
    present: State = ()
    fed: tuple[Tensor, ...] = ()


class RecurrenceStage(nn.Module):
    """Every layer's recurrence over rows that a pass fed to it; see `recurrence_contract`."""

    def __init__(self, parts: DecoderParts, contract: StageContract) -> None:
        super().__init__()
        self.input_names = [spec.name for spec in contract.inputs]
        self.mixers = parts.mixers

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the states after the rows, in the contract's order."""
        by_name = dict(zip(self.input_names, inputs, strict=True))
        found: list[Tensor] = []
        for layer, mixer in self.mixers.items():
            past = by_name[names.past_conv(layer)]
            both = torch.cat((past, by_name[names.fed_conv(layer)]), dim=1)
            found.append(both[:, -past.shape[1] :])
            if isinstance(mixer, GatedDelta):
                fed = Fed(*(by_name[name(layer)] for name in names.FED_NAMES))
                found.append(recur(mixer, fed.key, fed, by_name[names.past_state(layer)])[1])
        return tuple(found)


@contextmanager
def recurrent(mixer: Mixer) -> Iterator[None]:
    """Have HF's layer call the operators instead of its own recurrence or convolution."""
    mixer.module.forward = partial(_mix, mixer)
    try:
        yield
    finally:
        del mixer.module.forward


def _mix(mixer: Mixer, hidden_states: Tensor, *, stage_cache: LayerState, **_: Any) -> Tensor:
    """What HF's module does, over the state of its layer."""
    given = mixer.feed(hidden_states)
    before, *past = stage_cache.past
    answer = convolve(mixer, given.conv, before)
    stage_cache.fed = (given.conv,)
    stage_cache.present = (last_rows(before, given.conv, stage_cache.num_rows),)
    if isinstance(mixer, GatedDelta):
        assert isinstance(given, Given)
        answer, state, stage_cache.fed = _recurred(mixer, given, answer, past[0], stage_cache.num_rows)
        stage_cache.present += (state,)
    return mixer.finish(answer, given.gate)


def _recurred(
    mixer: GatedDelta, given: Given, convolved: Tensor, past: Tensor, num_rows: Tensor
) -> tuple[Tensor, Tensor, Fed]:
    """What the recurrence answers to convolved rows of which so many count, its state behind them, what fed it."""
    counts = (torch.arange(convolved.shape[1]) < num_rows)[None, :, None].to(convolved.dtype)
    query, key, value = mixer.split(convolved)
    fed = Fed(given.conv, key, value, given.decay * counts, given.rate * counts)
    answer, state = recur(mixer, query, fed, past)
    return answer, state, fed


def last_rows(before: Tensor, rows: Tensor, num_rows: Tensor) -> Tensor:
    """What the convolution reads next: `before` `[1, K - 1, C]`, moved on by the first `num_rows` of `rows`."""
    both = torch.cat((before, rows), dim=1)
    places = torch.arange(before.shape[1]) + num_rows
    if not torch.onnx.is_in_onnx_export():
        return both.index_select(1, places)
    moved: Tensor = torch.onnx.ops.symbolic("Gather", (both, places), {"axis": 1}, dtype=both.dtype, shape=before.shape)
    return moved


def convolve(mixer: Mixer, rows: Tensor, past: Tensor) -> Tensor:
    """Convolve rows `[1, S, channels]` behind those of `past`: `com.microsoft::CausalConvWithState`."""
    convolved, _ = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::CausalConvWithState",
        (rows, mixer.kernel, mixer.bias, past),
        {"activation": mixer.fused_activation, "channels_last": 1},
        dtypes=(rows.dtype,) * 2,
        shapes=(rows.shape, past.shape),
        version=1,
    )
    return convolved


def recur(mixer: GatedDelta, query: Tensor, fed: Fed, past: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence over rows: `com.microsoft::LinearAttention`.

    Returns:
        The answer `[1, S, value width]` to `query`, and the state after all rows, which does not depend on it.
    """
    answer, state = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        (query, fed.key, fed.value, past, fed.decay, fed.rate),
        {
            "q_num_heads": mixer.num_key_heads,
            "kv_num_heads": mixer.num_value_heads,
            "update_rule": "gated_delta",
        },
        dtypes=(fed.value.dtype,) * 2,
        shapes=(fed.value.shape, past.shape),
        version=1,
    )
    return answer, state
