"""Exit adapters: a low-rank correction of a prefix's hidden state before the target's own norm and head.

Owns: the adapter, its file, and its training against the target's final distribution.
Does not own: measuring exits (`exit_coverage.py`), the exported exit graph (`mirrorsd.export`).

`h' = h + up(down(h))`, then the target's final norm and LM head. Only the proxies change, never the text, so an adapter
is lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from mirrorsd.families import parts_of
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.names import EXIT_ADAPTERS_FILE, EXIT_ADAPTERS_FORMAT, adapter_down, adapter_up
from mirrorsd.graphs.whole_file import write_whole
from mirrorsd.training.divergence import HeadRows, LossMix, distance
from mirrorsd.training.run.device import autocast
from mirrorsd.training.run.optimizers import descend, set_rate
from mirrorsd.training.run.timed_run import RunConfig, RunProgress, TimedRun, print_progress
from mirrorsd.training.text.token_stream import TokenStream

__all__ = ["ExitAdapter", "check_rank", "load_adapters", "make_adapters", "save_adapters", "train_adapters"]

PEAK_RATE = 3e-3


def check_rank(rank: int, hidden: int) -> None:
    """Check an adapter's rank for hidden states of width `hidden`.

    Raises:
        ConfigError: It is not within 1..hidden.
    """
    if not 1 <= rank <= hidden:
        raise ConfigError(f"ExitAdapter.rank is {rank}; allowed are 1..{hidden} (the hidden size)")


class ExitAdapter(nn.Module):
    """A linear low-rank residual; it starts as the identity."""

    def __init__(self, hidden: int, rank: int) -> None:
        """Make an adapter for hidden states of width `hidden`.

        Raises:
            ConfigError: The rank is not within 1..hidden.
        """
        super().__init__()
        check_rank(rank, hidden)
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(rank, hidden, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the corrected hidden states, same shape."""
        corrected: Tensor = hidden + self.up(self.down(hidden))
        return corrected


def make_adapters(hidden: int, layers: Iterable[int], rank: int) -> dict[int, ExitAdapter]:
    """Return one untrained adapter per exit layer."""
    return {layer: ExitAdapter(hidden, rank) for layer in layers}


def save_adapters(folder: Path, adapters: dict[int, ExitAdapter], *, dtype: torch.dtype = torch.float16) -> None:
    """Write all adapters into one file beside the target's weights."""
    tensors = {}
    for layer, adapter in sorted(adapters.items()):
        for name, part in ((adapter_down(layer), adapter.down), (adapter_up(layer), adapter.up)):
            tensors[name] = part.weight.detach().to(dtype).contiguous()
    write_whole(folder / EXIT_ADAPTERS_FILE, save(tensors, metadata={"format": EXIT_ADAPTERS_FORMAT}))


def load_adapters(folder: Path) -> dict[int, ExitAdapter]:
    """Read the adapters beside a target's weights, in single precision.

    Raises:
        ExportError: No such file, not a whole one, or not of this format.
    """
    path = folder / EXIT_ADAPTERS_FILE
    if not path.is_file():
        raise ExportError(f"{path} does not exist; train adapters first, or export with an untrained exit")
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("format")
            if found != EXIT_ADAPTERS_FORMAT:
                raise ExportError(f"{path} has format {found!r}; expected {EXIT_ADAPTERS_FORMAT!r}")
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    adapters = {}
    for layer in sorted({int(name.split(".")[1]) for name in tensors}):
        down, up = tensors[adapter_down(layer)], tensors[adapter_up(layer)]
        adapters[layer] = ExitAdapter(up.shape[0], down.shape[0])
        adapters[layer].load_state_dict({"down.weight": down, "up.weight": up})
    return adapters


def exit_losses(target: PreTrainedModel, adapters: nn.ModuleDict, ids: Tensor) -> dict[str, Tensor]:
    """Return, per exit layer, KL(target || exit) on `ids [B,S]`."""
    parts = parts_of(target)
    with torch.no_grad():
        decoder: Any = cast(Any, target).get_decoder()
        outputs = decoder(ids, use_cache=False, output_hidden_states=True)
    by_target = HeadRows(outputs.last_hidden_state, parts.lm_head.weight, parts.logit_scale)
    share = torch.full(ids.shape, 1 / ids.numel(), device=ids.device)
    losses = {}
    for layer, adapter in adapters.items():
        rows = parts.norm(adapter(outputs.hidden_states[int(layer)]))
        losses[layer] = distance(by_target, by_target._replace(rows=rows), share, LossMix(kl=1.0)).total
    return losses


def exit_logits(target: PreTrainedModel, hidden: Tensor, adapter: nn.Module | None) -> Tensor:
    """Apply adapter (None: an untrained exit), final norm and LM head to a prefix's hidden state `[..., H]`."""
    return parts_of(target).logits(hidden if adapter is None else adapter(hidden))


def train_adapters(
    target: PreTrainedModel,
    adapters: dict[int, ExitAdapter],
    text: TokenStream,
    run: RunConfig,
    *,
    batch: tuple[int, int] = (6, 512),
    show: Callable[[RunProgress], None] = print_progress,
) -> None:
    """Train adapters in place, all exit layers in the same passes of the frozen target.

    Args:
        target: The model.
        adapters: By exit layer.
        text: What the target wrote.
        run: Where, and for how many seconds; a killed run goes on where it was.
        batch: Sequences and tokens per sequence.
        show: Told how far it is.
    """
    target.requires_grad_(False)
    modules = nn.ModuleDict({str(layer): adapter for layer, adapter in adapters.items()})
    optimizer = torch.optim.AdamW(modules.parameters(), lr=PEAK_RATE, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["peak_lr"] = PEAK_RATE
    timed = TimedRun(run, {"adapters": modules, "optimizer": optimizer, "text": text}, show)

    def step(share: float) -> tuple[int, dict[str, float]]:
        set_rate([optimizer], share)
        ids = text.take(*batch)[:, :-1]
        with autocast():
            losses = exit_losses(target, modules, ids)
        descend(torch.stack(list(losses.values())).sum(), modules.parameters(), [optimizer])
        return ids.numel(), {f"exit_{layer}": loss.item() for layer, loss in losses.items()}

    timed.run(step, lambda: None)
