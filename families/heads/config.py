"""What a drafting head is: its kind, the features it reads, its sizes. Kept as `config.json` beside its weights.

Owns: the entries, their checks, and which tensors are the target's own. Does not own: the networks, weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mirrorsd.graphs.errors import ConfigError

from .kind import KINDS, HeadKind

HEAD_KIND = "head_kind"
"""Entry of config.json that makes a folder a head's."""
VOCABULARIES = ("shared", "own", "low-rank", "reduced")
FINAL = "final"
"""The tap behind the target's final norm: what its LM head reads."""
EMBEDDING, LM_HEAD, TOKEN_MAP = "embed_tokens.weight", "lm_head.weight", "lm_head.map"
"""Names of the tensors that a head may borrow from its target `[V, H]`, and of a reduced vocabulary's map."""

_CHOICES = {
    "vocabulary": VOCABULARIES,
    "tap_norm": ("none", "each", "joined"),
    "joins": ("attention", "projection"),
    "link": ("none", "gated", "markov"),
}
_AT_LEAST_ONE = ("length", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head's sizes and switches; `H` and `V` are its target's.

    Attributes:
        head_kind: A file of `kinds/`.
        taps: What of the target is read: numbers of layers passed (0 is the embedding's output, the last number stands
            before the final norm), or "final" (behind it).
        length: Guesses `K` per step.
        hidden_size: `H`.
        vocab_size: `V`.
        vocabulary: The head over the vocabulary. `shared`: the target's; `own`: one of the same size (one per guess
            for Medusa and Hydra); `low-rank`: `H -> head_rank -> V`; `reduced`: some of the tokens, with a map.
        num_logits: Tokens that can be guessed, `V_d`; fewer than `V` where it is reduced.
        head_rank: Of a low-rank vocabulary, else 0.
        depth: Residual blocks of each Medusa or Hydra head.
        num_layers: Decoder layers; for Hydra the layer before the heads (0: none), for streams the target's last ones.
        num_heads: Query heads of a layer.
        num_kv_heads: Key and value heads of a layer.
        head_dim: Width of a head.
        intermediate_size: Width inside a layer's gated feed-forward part.
        rms_norm_eps: Of every norm.
        rope: Rotary positions, as Hugging Face's `rope_parameters`; `partial_rotary_factor` of a head turns.
        max_positions: Positions that the target was made for.
        qk_norm: Queries and keys of every head are normed (Qwen3).
        attention_bias: Projections of attention have a bias.
        attention_gate: What a head has attended to is multiplied with a gate, which stands beside its query.
        tap_norm: Norm over the taps of eagle3: `none`, `each`, or one over all of them `joined`.
        joins: How eagle3 joins token and state: `attention` reads both, or a `projection` before the layer (MTP).
        norm_before_residual: Eagle3's residual is the normed state.
        feeds_norm: Eagle3 feeds back what is behind its final norm.
        own_embedding: Tokens are embedded by a table of its own, which was trained further than the target's.
        mask_token: Token whose embedding stands for the unknown ones of a block; None: a trained row. An eagle3 head
            that has one guesses all tokens in one pass over such rows (P-EAGLE).
        samples_anchor: The block's first row, the known token's, guesses too.
        link: What a block's guesses learn of those before them: `gated` residual, `markov` table, or `none`.
        link_rank: Hidden units of the link.
        adapter_rank: Hidden units of the streams' adapters.
        logit_divisor: The target's, for logits.
        logit_cap: The target's, for logits.
    """

    head_kind: str
    taps: tuple[int | str, ...]
    length: int
    hidden_size: int
    vocab_size: int
    vocabulary: str = "shared"
    num_logits: int
    head_rank: int = 0
    depth: int = 1
    num_layers: int = 0
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048
    qk_norm: bool = False
    attention_bias: bool = False
    attention_gate: bool = False
    tap_norm: str = "none"
    joins: str = "attention"
    norm_before_residual: bool = False
    feeds_norm: bool = False
    own_embedding: bool = False
    mask_token: int | None = None
    samples_anchor: bool = True
    link: str = "none"
    link_rank: int = 0
    adapter_rank: int = 0
    logit_divisor: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in ({"head_kind": tuple(sorted(KINDS))} | _CHOICES).items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"a head's {name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"a head's {name} is {getattr(self, name)}; it must be at least 1")
        self._check_taps()
        self._check_vocabulary()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"a head has {self.num_heads} query heads for {self.num_kv_heads} key-value heads")
        fewest, most = self.kind.layers
        if self.num_layers > most:
            raise ConfigError(f"a {self.head_kind} head has num_layers={self.num_layers}; at most {most} are allowed")
        if (self.num_layers > 0 or fewest > 0) and min(self.num_layers, self.intermediate_size) < 1:
            raise ConfigError(
                f"a {self.head_kind} head has num_layers={self.num_layers} and "
                f"intermediate_size={self.intermediate_size}; both must be at least 1"
            )
        if self.borrows_layers != (self.adapter_rank > 0):
            raise ConfigError(
                f"a {self.head_kind} head has adapter_rank={self.adapter_rank}; streams have adapters, and only they"
            )
        if (self.link != "none") != (self.link_rank > 0):
            raise ConfigError(f"a head's link is {self.link!r} with link_rank={self.link_rank}; a link has a rank")

    def _check_taps(self) -> None:
        wrong = [tap for tap in self.taps if tap != FINAL and not (isinstance(tap, int) and tap >= 0)]
        if wrong or not self.taps:
            raise ConfigError(f"a head's taps are {list(self.taps)}; give numbers of layers, or {FINAL!r}")
        if self.kind.reads_one_tap and len(self.taps) != 1:
            raise ConfigError(f"a {self.head_kind} head reads one tap, not {list(self.taps)}; {FINAL!r} is usual")
        first = self.taps[0]
        entering = range(first, first + self.num_layers) if isinstance(first, int) else ()
        if self.borrows_layers and self.taps != tuple(entering):
            raise ConfigError(
                f"a {self.head_kind} head reads what enters each of its {self.num_layers} layers, not taps "
                f"{list(self.taps)}"
            )

    def _check_vocabulary(self) -> None:
        if (self.vocabulary == "low-rank") != (self.head_rank > 0):
            raise ConfigError(
                f"a head's vocabulary is {self.vocabulary!r} with head_rank={self.head_rank}; a low-rank one has a rank"
            )
        is_smaller = 0 < self.num_logits < self.vocab_size
        if self.num_logits != self.vocab_size and not (self.vocabulary == "reduced" and is_smaller):
            raise ConfigError(
                f"a head with vocabulary {self.vocabulary!r} names {self.num_logits} of {self.vocab_size} tokens; only "
                "a reduced one names fewer"
            )

    @property
    def kind(self) -> HeadKind:
        """What is particular to its kind."""
        return KINDS[self.head_kind]

    @property
    def reads_tokens(self) -> bool:
        """Whether the tokens behind the rows are read."""
        return self.kind.reads_tokens

    @property
    def borrows_layers(self) -> bool:
        """Whether its layers are the target's last ones."""
        return self.kind.borrows_layers

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Names of the tensors that are the target's and in no file of the head."""
        embedding = (EMBEDDING,) if self.reads_tokens and not self.own_embedding else ()
        lm_head = (LM_HEAD,) if self.vocabulary == "shared" else ()
        return (*embedding, *lm_head, *(self._layer_tensors() if self.borrows_layers else ()))

    def _layer_tensors(self) -> tuple[str, ...]:
        """Names of all tensors of the layers, and of the norm behind them."""
        products = [f"self_attn.{name}_proj" for name in "qkvo"]
        entries = [f"{name}.bias" for name in products] if self.attention_bias else []
        products += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += [f"self_attn.{name}_norm" for name in "qk"] if self.qk_norm else []
        entries += [f"{name}.weight" for name in (*products, *norms)]
        return ("norm.weight", *(f"layers.{number}.{entry}" for number in range(self.num_layers) for entry in entries))

    @property
    def num_vocabularies(self) -> int:
        """Heads over the vocabulary: one for all guesses, or one each."""
        return self.length if self.vocabulary == "own" and self.kind.has_vocabularies else 1

    @property
    def state_width(self) -> int:
        """Width of what the head over the vocabulary reads."""
        return (self.head_rank or self.hidden_size) + (self.link_rank if self.link == "markov" else 0)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers with a cache, key-value heads, width of a head."""
        return self.num_layers, self.num_kv_heads, self.head_dim

    def write(self, folder: Path) -> None:
        """Write `config.json` into `folder`."""
        text = json.dumps(asdict(self), indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> HeadConfig:
        """Read `config.json` of a head's folder.

        Raises:
            ConfigError: There is none, it is not a head's, or it has entries that no head has.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no config.json; expected the folder of a drafting head")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON ({error}); train or convert the head again") from error
        if not isinstance(found, dict) or HEAD_KIND not in found:
            raise ConfigError(f"{path} is not a drafting head's: it has no {HEAD_KIND!r}")
        unknown = sorted(set(found) - {entry.name for entry in fields(cls)})
        if unknown:
            raise ConfigError(f"{path} has entries that this version does not know: {', '.join(unknown)}")
        try:
            return cls(**{**found, "taps": tuple(found.get("taps", ()))})
        except TypeError as error:
            raise ConfigError(f"{path} is incomplete: {error}") from error
