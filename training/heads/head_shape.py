"""What a head is before it is trained: its sizes for a target, and weights that begin as the target's where they can.

Does not own: the defaults of each kind, the networks (`mirrorsd.families.heads.kinds`), training (`head_training.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from mirrorsd.families import DecoderParts, parts_of
from mirrorsd.families.heads import KINDS, HeadConfig, HeadNetwork, build_head
from mirrorsd.families.heads.config import FINAL, VOCABULARIES
from mirrorsd.families.heads.kind import Training
from mirrorsd.families.heads.lending import check_lending
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.draft_shape import low_rank_head
from mirrorsd.training.heads.features import check_taps
from mirrorsd.training.heads.head_folder import lend

__all__ = ["HeadPlan", "frequent_tokens", "make_head", "num_trained"]

_SEED = 22
_LINK_RANK = 128
_NORMS_OF_A_LAYER = {"input_layernorm", "post_attention_layernorm"}
"""Those of Llama's layers and of heads'; in layers with others, these names may stand for norms at other places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """What is asked for; None or 0 stands for the kind's default.

    `num_layers` 0 is a Hydra head without its layer. `link_rank` -1 is the default of a block, 0 no link.
    """

    kind: str
    taps: tuple[int | str, ...] = ()
    length: int = 0
    vocabulary: str = "shared"
    head_rank: int = 128
    num_logits: int = 16384
    depth: int = 1
    num_layers: int | None = None
    link_rank: int = -1
    adapter_rank: int = 128

    def __post_init__(self) -> None:
        if self.kind not in KINDS or KINDS[self.kind].training is None:
            trained = ", ".join(name for name, kind in sorted(KINDS.items()) if kind.training is not None)
            raise ConfigError(f"HeadPlan.kind is {self.kind!r}; allowed: {trained}")
        if self.vocabulary not in VOCABULARIES:
            raise ConfigError(f"HeadPlan.vocabulary is {self.vocabulary!r}; allowed: {', '.join(VOCABULARIES)}")
        fewest, most = KINDS[self.kind].layers
        if self.num_layers is not None and not fewest <= self.num_layers <= most:
            allowed = f"{fewest} or more" if most > fewest else str(fewest)
            raise ConfigError(f"HeadPlan.num_layers is {self.num_layers}; a {self.kind} head has {allowed}")
        if KINDS[self.kind].reads_one_tap and len(self.taps) > 1:
            raise ConfigError(f"HeadPlan.taps names {len(self.taps)}; a {self.kind} head reads one, usually {FINAL}")

    @property
    def usual(self) -> Training:
        """The kind's defaults."""
        training = KINDS[self.kind].training
        assert training is not None
        return training

    def config(self, target: PreTrainedModel) -> HeadConfig:
        """Return the config of such a head for `target`.

        Raises:
            ConfigError: Nothing that a head can be, or a target whose head over the vocabulary cannot be shared.
        """
        parts, given = parts_of(target), target.config
        check_shareable(target, parts)
        kind, usual = KINDS[self.kind], self.usual
        num_layers = usual.num_layers if self.num_layers is None else self.num_layers
        if kind.borrows_layers and self.num_layers is None:
            num_layers = max(1, min(num_layers, len(parts.layers) // 3))
        taps = self.taps or usual.taps(len(parts.layers), num_layers)
        check_taps(taps, len(parts.layers))
        lasts = usual.taps(len(parts.layers), num_layers)
        if kind.borrows_layers and len(taps) != len(lasts):
            raise ConfigError(
                f"HeadPlan.taps names {len(taps)} for HeadPlan.num_layers {num_layers}; a {self.kind} head reads what "
                f"enters each of its layers, as {', '.join(map(str, lasts))}"
            )
        is_reduced = self.vocabulary == "reduced"
        rank = self.link_rank if self.link_rank >= 0 else _LINK_RANK
        sizes: dict[str, Any] = _layer_sizes(given) if kind.layers[1] else {}
        if kind.borrows_layers:
            sizes |= {"attention_bias": bool(getattr(given, "attention_bias", False))}
        sizes |= usual.entries({"link_rank": rank, "adapter_rank": self.adapter_rank})
        config = HeadConfig(
            head_kind=self.kind,
            taps=taps,
            length=self.length or usual.length,
            hidden_size=int(given.hidden_size),
            vocab_size=parts.lm_head.out_features,
            vocabulary=self.vocabulary,
            num_logits=min(self.num_logits, parts.lm_head.out_features) if is_reduced else parts.lm_head.out_features,
            head_rank=self.head_rank if self.vocabulary == "low-rank" else 0,
            depth=self.depth,
            num_layers=num_layers,
            max_positions=int(given.max_position_embeddings),
            rms_norm_eps=float(getattr(given, "rms_norm_eps", 1e-5)),
            logit_divisor=parts.logit_scale.divisor,
            logit_cap=parts.logit_scale.cap,
            **sizes,
        )
        check_lending(config, given.to_dict())
        return config


def check_shareable(target: PreTrainedModel, parts: DecoderParts) -> None:
    """Check that heads can read the target's embedding and LM head as they are.

    Raises:
        ConfigError: The LM head has a bias, or one of them is not `[V, H]`.
    """
    hidden, embedding = target.config.hidden_size, cast(nn.Embedding, target.get_input_embeddings())
    shape = tuple(embedding.weight.shape)
    if parts.lm_head.bias is not None or shape != (parts.lm_head.out_features, hidden):
        raise ConfigError(
            f"drafting heads want a target whose embedding is as its LM head, {parts.lm_head.out_features} x {hidden} "
            f"without a bias; the embedding of this {target.config.model_type} is {list(shape)}"
        )


def _layer_sizes(given: Any) -> dict[str, Any]:
    """Sizes of a decoder layer like the target's."""
    heads = int(given.num_attention_heads)
    rope = getattr(given, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope or "partial_rotary_factor" in rope:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "num_heads": heads,
        "num_kv_heads": int(getattr(given, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(given, "head_dim", None) or given.hidden_size // heads),
        "intermediate_size": int(getattr(given, "intermediate_size", None) or 4 * given.hidden_size),
        "rope": dict(rope),
        "qk_norm": given.model_type == "qwen3",
    }


def num_trained(config: HeadConfig) -> int:
    """How many parameters of such a head are trained, those that are not its target's; nothing takes memory."""
    with torch.device("meta"):
        network = build_head(config)
    return sum(own.numel() for name, own in network.named_parameters() if name not in config.borrowed)


def frequent_tokens(tokens: NDArray[Any], count: int, vocab_size: int) -> Tensor:
    """The `count` most frequent of `tokens`, in rising order `[count]`; ties go to the smaller id.

    >>> frequent_tokens(np.array([5, 5, 2, 2, 7]), 2, 9).tolist()
    [2, 5]
    """
    counts = np.bincount(tokens.astype(np.int64), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def make_head(config: HeadConfig, target: PreTrainedModel, tokens: NDArray[Any] | None = None) -> HeadNetwork:
    """Return an untrained head for `target`: its layers, norms and vocabulary begin as the target's where shapes agree.

    `tokens` is text to count, for a reduced vocabulary.
    """
    torch.manual_seed(_SEED)
    network = build_head(config)
    with torch.no_grad():
        _begin_vocabulary(network, parts_of(target).lm_head.weight.float(), tokens)
        _begin_layers(network, target)
    network.to(target.device)
    lend(network, target)
    return network


def _begin_vocabulary(network: HeadNetwork, head: Tensor, tokens: NDArray[Any] | None) -> None:
    config, own = network.config, network.lm_head
    if config.vocabulary == "own":
        own.weight.copy_(head.expand_as(own.weight))
    elif own.down is not None:
        halves = low_rank_head(head, config.head_rank)
        own.weight.copy_(halves.up)
        own.down.weight.copy_(halves.down)
    elif own.map is not None:
        if tokens is None:
            raise ConfigError("a reduced vocabulary wants text whose tokens can be counted")
        own.map.copy_(frequent_tokens(tokens, config.num_logits, config.vocab_size))
        own.weight.copy_(head[own.map.to(head.device)])


def _begin_layers(network: HeadNetwork, target: PreTrainedModel) -> None:
    """Copy what fits: the last layers, the final norm, and each tap's norm from the layer that reads it."""
    own, parts = network.state_dict(), parts_of(target)
    theirs = {f"norm.{name}": weight for name, weight in _as_multiplied(parts.norm).items()}
    first = len(parts.layers) - network.config.num_layers
    for number in range(network.config.num_layers):
        layer = parts.layers[first + number]
        of_layer = _as_multiplied(layer)
        if {name for name, _ in layer.named_children() if "norm" in name} != _NORMS_OF_A_LAYER:
            of_layer = {name: weight for name, weight in of_layer.items() if "norm" not in name.partition(".")[0]}
        theirs |= {f"layers.{number}.{name}": weight for name, weight in of_layer.items()}
    for place, tap in enumerate(network.config.taps):
        if isinstance(tap, int) and tap < len(parts.layers):
            of_layer = _as_multiplied(parts.layers[tap])
            theirs |= {f"fc_norm.{place}.weight": of_layer.get("input_layernorm.weight", torch.empty(0))}
    fitting = {name: weight for name, weight in theirs.items() if name in own and own[name].shape == weight.shape}
    network.load_state_dict({**own, **fitting})


def _as_multiplied(module: nn.Module) -> dict[str, Tensor]:
    """The weights of `module` by name; those of norms are what a row is multiplied by, which some store less one."""
    found: dict[str, Tensor] = module.state_dict()
    for name, part in module.named_modules():
        if type(part).__name__.endswith("RMSNorm") and isinstance(part.weight, Tensor):
            said = part(torch.ones_like(part.weight))
            found[f"{name}.weight".lstrip(".")] = part.weight + (said - part.weight).mean().round()
    return found
