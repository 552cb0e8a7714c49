"""What a draft is before it is trained: a small decoder with the target's vocabulary, from nothing or from a model.

Owns: the sizes of a draft from scratch. Does not own: streams (`streaming_draft.py`), training (`distill_draft.py`).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mirrorsd.families.low_rank_head import HEAD_RANK, HEAD_TOKENS, LM_HEAD, SHARES_EMBEDDING, fit_head
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.distill_draft import embed_like_target
from mirrorsd.training.models.streaming_draft import StreamingDraft, StreamShape, read_stream_shape
from mirrorsd.training.models.whole_model import load_whole

__all__ = [
    "DraftHead",
    "check_draft_sizes",
    "check_layers",
    "check_same_streams",
    "draft_from_layers",
    "draft_from_model",
    "draft_from_scratch",
    "low_rank_head",
]

_HEAD_DIM = 64
_SEED = 21
_ENTRIES_BY_LAYER = ("layer_types", "no_rope_layers")
"""Entries of a config that say something of each layer; the second is SmolLM3's."""
_LIKE_LLAMA = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2")


class DraftHead(NamedTuple):
    """Of which rank the head is (0: the target's own), and how many ids it names, the first ones (0: all)."""

    rank: int = 0
    num_tokens: int = 0


def check_draft_sizes(hidden: int, layers: int) -> None:
    """Check the sizes of a draft from scratch.

    Raises:
        ConfigError: A hidden size that is no multiple of the head size, or no layers.
    """
    if hidden < _HEAD_DIM or hidden % _HEAD_DIM or layers < 1:
        field, found = ("layers", layers) if layers < 1 else ("hidden", hidden)
        raise ConfigError(
            f"DraftPlan.{field} is {found}; a draft from scratch has a hidden size that is a multiple of {_HEAD_DIM}, "
            "and at least 1 layer"
        )


def draft_from_scratch(target: PreTrainedModel, streams: StreamShape, *, hidden: int, layers: int) -> StreamingDraft:
    """Return an untrained Llama-like draft for `target`; its embeddings start like the target's where they can.

    Heads of 64, one key-value head per two, feed-forward of 2.5 times the hidden size, tied embeddings; vocabulary,
    special tokens and context are the target's.
    """
    check_draft_sizes(hidden, layers)
    torch.manual_seed(_SEED)
    given, heads = target.config, hidden // _HEAD_DIM
    config = LlamaConfig(
        vocab_size=given.vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=_HEAD_DIM,
        intermediate_size=round(2.5 * hidden / 64) * 64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=given.max_position_embeddings,
        rms_norm_eps=1e-5,
        pad_token_id=given.pad_token_id,
        bos_token_id=given.bos_token_id,
        eos_token_id=given.eos_token_id,
    )
    draft = StreamingDraft(LlamaForCausalLM(config), **streams._asdict())
    if hidden <= given.hidden_size:
        embed_like_target(draft, target)
    return draft


def check_same_streams(folder: Path, asked: StreamShape) -> None:
    """Check that the streams of the draft in `folder`, if it has any, are those that are asked for.

    A link may be new.

    Raises:
        ConfigError: They are others: training would have to throw them away.
        ExportError: The streams file is not of this format.
    """
    found = read_stream_shape(folder)
    if not asked.num_streams or found is None:
        return
    if found not in (asked, asked._replace(link_rank=0)):
        raise ConfigError(
            f"the draft in {folder} has {_in_words(found)}; asked for are {_in_words(asked)}: ask for what it has, or "
            "start from a copy of it without its streams file"
        )


def draft_from_layers(
    target: PreTrainedModel, streams: StreamShape, layers: tuple[int, ...], head: DraftHead
) -> StreamingDraft:
    """Return a draft that is made of some of the target's layers and shares its token embedding.

    A head of low rank starts as near to the target's as it can be. A whole one is the target's own: where that is its
    token embedding, it is shared and not trained, else it is copied and trained with the rest.
    """
    torch.manual_seed(_SEED)
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    config.tie_word_embeddings = config.tie_word_embeddings and not head.rank
    for entry in _ENTRIES_BY_LAYER:
        if getattr(config, entry, None):
            setattr(config, entry, [getattr(config, entry)[number] for number in layers])
    setattr(config, SHARES_EMBEDDING, True)
    setattr(config, HEAD_RANK, head.rank or None)
    setattr(config, HEAD_TOKENS, head.num_tokens or None)
    base: Any = fit_head(type(target)(config))
    whole = target.state_dict()
    taken = {name: whole[name] for name in base.state_dict() if name in whole and not name.startswith("model.layers.")}
    for place, number in enumerate(layers):
        old, new = f"model.layers.{number}.", f"model.layers.{place}."
        taken |= {new + name[len(old) :]: weight for name, weight in whole.items() if name.startswith(old)}
    if head.rank:
        halves = low_rank_head(whole[LM_HEAD].float(), head.rank)
        taken |= {LM_HEAD: halves.up, "model.norm.down.weight": halves.down}
        taken["model.norm.norm.weight"] = whole["model.norm.weight"]
    base.load_state_dict(taken)
    return StreamingDraft(base, **streams._asdict())


class LowRankHead(NamedTuple):
    """The halves of a head: `down [rank, H]`, then `up [V, rank]`."""

    down: Tensor
    up: Tensor


def low_rank_head(head: Tensor, rank: int) -> LowRankHead:
    """The two halves whose product is as near to `head` `[V, H]` as any of that rank: its main directions."""
    directions = torch.linalg.eigh(head.T @ head).eigenvectors[:, -rank:]
    return LowRankHead(directions.T.contiguous(), head @ directions)


def check_layers(layers: tuple[int, ...], num_layers: int, model_type: str) -> None:
    """Check which of a target's layers a draft is to be made of.

    Raises:
        ConfigError: layers that the target does not have, not in rising order, or a family laid out otherwise.
    """
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigError(f"DraftPlan.from_layers is {layers}; give numbers within 0..{num_layers - 1} in rising order")
    if model_type not in _LIKE_LLAMA:
        raise ConfigError(
            f"a draft cut from the target wants a family of {', '.join(_LIKE_LLAMA)}; this target's is {model_type}: "
            "train one from scratch, or start from a small model"
        )


def draft_from_model(folder: Path, streams: StreamShape, embedding: Tensor | None = None) -> StreamingDraft:
    """Return a small causal LM with streams: its own if it has been trained to stream, else untrained ones.

    A draft that streams without a link gets an untrained one, which changes nothing. Without streams (0) it is an
    ordinary draft, whatever it has been trained for.

    Raises:
        ConfigError: It has streams of another shape.
    """
    torch.manual_seed(_SEED)
    check_same_streams(folder, streams)
    if not streams.num_streams or read_stream_shape(folder) is None:
        return StreamingDraft(load_whole(folder, embedding), **streams._asdict())
    draft = StreamingDraft.load(folder, embedding)
    if draft.link is None:
        draft.add_link(streams.link_rank)
    return draft


def _in_words(shape: StreamShape) -> str:
    return (
        f"{shape.num_streams} streams in {shape.num_stream_layers} layers with adapters of rank {shape.stream_rank} "
        f"and a link of rank {shape.link_rank}"
    )
