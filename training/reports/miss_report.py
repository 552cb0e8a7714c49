"""Where the draft missed: which lists hold the token that the target chose instead.

Owns: the table. Does not own: how the runtime picks roots from such lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mirrorsd.training.exit_adapter import exit_logits
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.text.self_text import SelfText

__all__ = ["MISS_DEPTHS", "measure_misses"]

MISS_DEPTHS = (1, 2, 4, 8)


@torch.inference_mode()
def measure_misses(
    target: PreTrainedModel, exits: Mapping[int, nn.Module | None], draft: StreamingDraft, texts: Sequence[SelfText]
) -> dict[str, Any]:
    """Return, over the positions where the draft's best token is not the target's, how often a list holds the latter.

    The lists: the draft's runners-up, each exit, and both (the first `k` of each). The draft's own token, which cannot
    be a correction, is taken out of all of them.

    Args:
        target: Its greedy tokens are the truth.
        exits: Adapter by exit layer, None for an untrained exit.
        draft: The draft.
        texts: What the target wrote greedily.

    Returns:
        `{"positions": n, "misses": m, "draft": {"1": share, ...}, "exit_3": {...}, "both_3": {...}}`
    """
    names = ["draft", *(f"{kind}_{layer}" for layer in exits for kind in ("exit", "both"))]
    hits = {name: torch.zeros(len(MISS_DEPTHS)) for name in names}
    positions = misses = 0
    for text in texts:
        ids = torch.tensor([text.tokens])
        outputs = target(ids, use_cache=False, output_hidden_states=True)
        written = slice(text.prompt_length - 1, len(text.tokens) - 1)
        truth = ids[0, written.start + 1 :]
        by_draft = draft.logits(draft(ids, torch.tensor([0])).main[0, written])[..., : target.config.vocab_size]
        own = by_draft.argmax(-1)
        missed = own != truth
        positions, misses = positions + len(truth), misses + int(missed.sum())
        truth, own = truth[missed, None], own[missed, None]
        of_draft = _is_among(by_draft[missed], own, truth)
        hits["draft"] += of_draft.sum(0)
        for layer, adapter in exits.items():
            by_exit = exit_logits(target, outputs.hidden_states[layer][0, written][missed], adapter)
            of_exit = _is_among(by_exit, own, truth)
            hits[f"exit_{layer}"] += of_exit.sum(0)
            hits[f"both_{layer}"] += (of_draft | of_exit).sum(0)
    return {"positions": positions, "misses": misses} | {name: _shares(found, misses) for name, found in hits.items()}


def _is_among(logits: Tensor, own: Tensor, truth: Tensor) -> Tensor:
    """Say for each row of `logits [n,V]` whether `truth [n,1]` is in the first 1, 2, 4, 8; `[n,4]` bool."""
    others = logits.scatter(-1, own, float("-inf"))
    is_hit = others.topk(min(max(MISS_DEPTHS), logits.shape[-1])).indices == truth
    return torch.stack([is_hit[:, :depth].any(-1) for depth in MISS_DEPTHS], dim=-1)


def _shares(hits: Tensor, misses: int) -> dict[str, float]:
    return {
        str(depth): round(count / max(misses, 1), 4) for depth, count in zip(MISS_DEPTHS, hits.tolist(), strict=True)
    }
