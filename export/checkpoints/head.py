"""A head's folder: is it complete, does it belong to this target, and its network with the target's own weights in it.

Owns: reading `config.json` and `model.safetensors` of a head, ours or one that others published. Does not own: the
networks and what published names mean (`families.heads`), its stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mirrorsd.export.checkpoints.checkpoint import Checkpoint, training_seconds
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.weights.stored_tensors import read_header
from mirrorsd.families.heads import HeadConfig, HeadNetwork, build_head
from mirrorsd.families.heads.config import FINAL, TOKEN_MAP
from mirrorsd.families.heads.kinds.mtp import PREFIX, is_offset, mtp_config, mtp_names
from mirrorsd.families.heads.layouts import is_published
from mirrorsd.families.heads.lending import check_lending, lent_by
from mirrorsd.families.heads.published import convert_head
from mirrorsd.families.registry import error_words
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.documents import DocumentError, parse_json, read_text
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import Head, SourceModel
from mirrorsd.graphs.manifest_values import MOST_GUESSES
from mirrorsd.hub.checkpoints import origin_of

NUM_CANDIDATES = 4
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint:
    """A checked head of a target with `num_target_layers` layers."""

    folder: Path
    config: HeadConfig
    tensors: Mapping[str, Tensor]
    num_target_layers: int

    @property
    def name(self) -> str:
        """Name of its stage."""
        return names.head_name(self.config.head_kind)

    @property
    def shape(self) -> HeadShape:
        """Its sizes as a contract has them."""
        config = self.config
        num_layers, num_kv_heads, head_dim = config.cache_shape
        taps = tuple(self.num_target_layers + 1 if tap == FINAL else int(tap) for tap in config.taps)
        return HeadShape(
            taps=taps,
            length=config.length,
            num_candidates=min(NUM_CANDIDATES, config.num_logits),
            num_layers=num_layers,
            num_kv_heads=num_kv_heads if num_layers else 0,
            head_dim=head_dim if num_layers else 0,
        )

    @property
    def entry(self) -> Head:
        """What a manifest says of it."""
        origin = origin_of(self.folder)
        source = SourceModel(
            name=origin.repository if origin else self.folder.resolve().name,
            revision=origin.revision if origin else "",
            family=self.config.head_kind,
            licence="unknown",
            num_parameters=sum(tensor.numel() for name, tensor in self.tensors.items() if name != TOKEN_MAP),
            training_seconds=training_seconds(self.folder, "head"),
        )
        return Head(
            kind=self.config.head_kind,
            file=names.stage_file(self.name),
            source=source,
            shape=self.shape,
            vocabulary=self.config.vocabulary,
            num_tokens=self.config.num_logits,
        )

    def network(self, target: Any, dtype: torch.dtype) -> HeadNetwork:
        """Build it in `dtype` around what it borrows of `target`, Hugging Face's model.

        Raises:
            ConfigError: the target is not of the kind that it was made for.
            ExportError: weights are missing, are too many, or have other shapes.
        """
        network = build_head(self.config).eval()
        borrowed: Any = lent_by(target, network)
        state = {**self.tensors, **{name: network.state_dict()[name] for name in self.config.borrowed}}
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            flaws = " ".join(str(error).split())
            raise ExportError(
                f"the head {self.folder} cannot be loaded: its config.json and its weights do not belong together "
                f"({flaws}). Copy its whole folder, or train it again"
            ) from error
        network = network.to(dtype).requires_grad_(requires_grad=False)
        for name in self.config.borrowed:
            owner, _, attribute = name.rpartition(".")
            network.get_submodule(owner)._parameters[attribute] = borrowed[name]
        return network


def open_head(folder: Path, target: Checkpoint) -> HeadCheckpoint:
    """Check the head in `folder` against the target that it is for.

    Raises:
        ConfigError: its config.json is no head's, or of one whose layers this target cannot lend.
        ExportError: its weights are missing or damaged, or it was made for another target.
    """
    num_layers = int(target.config["num_hidden_layers"])
    config, tensors = _read(folder, target)
    for name in ("hidden_size", "vocab_size"):
        found, expected = getattr(config, name), int(target.config[name])
        if found != expected:
            raise ExportError(
                f"the head {folder} was made for a target with {name} {found}; {target.folder} has {expected}: take "
                "the target that it was trained on"
            )
    check_lending(config, target.config)
    wrong = [tap for tap in config.taps if tap != FINAL and not 0 < int(tap) <= num_layers]
    if wrong:
        raise ExportError(
            f"the head {folder} reads hidden states after {wrong[0]} layers; a target of {num_layers} layers gives "
            f"those after 1 to {num_layers}, and {FINAL!r}, behind the final norm"
        )
    if config.length > MOST_GUESSES:
        raise ExportError(f"the head {folder} guesses {config.length} tokens; a window has at most {MOST_GUESSES}")
    return HeadCheckpoint(folder=folder, config=config, tensors=tensors, num_target_layers=num_layers)


def open_heads(folders: tuple[str, ...], target: Checkpoint) -> tuple[HeadCheckpoint, ...]:
    """Open several heads of one target, and the one that its checkpoint brings along, if it does.

    One whose layer is a mixture of experts is left out: heads run as dense layers.

    Raises:
        ExportError: two are of one kind; and what `open_head` raises.
    """
    heads = tuple(open_head(Path(folder), target) for folder in folders)
    own = [name for name in target.tensors if name.startswith(PREFIX)]
    if own and not any(".experts." in name for name in own):
        heads += (_own_head(target),)
    kinds = [head.config.head_kind for head in heads]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            raise ExportError(f"two heads are of the kind {kind!r}; a bundle has one of a kind: leave one away")
    return heads


def _own_head(target: Checkpoint) -> HeadCheckpoint:
    """The head among a target's own tensors, which transformers leaves out.

    Raises:
        ExportError: it has more layers than one.
    """
    stored = mtp_names(target.tensors)
    if any(name.startswith("layers.1.") for name in stored.values()):
        raise ExportError(
            f"the target {target.path} brings a head of more layers than one along (`mtp.layers.1`): such are not read"
        )
    tensors = {name: target.tensors[of].read(torch.float32) for of, name in stored.items()}
    return HeadCheckpoint(
        folder=target.folder,
        config=mtp_config(target.config),
        tensors={name: tensor + 1 if is_offset(name) else tensor for name, tensor in tensors.items()},
        num_target_layers=int(target.config["num_hidden_layers"]),
    )


def _read(folder: Path, target: Checkpoint) -> tuple[HeadConfig, Mapping[str, Tensor]]:
    """Config and own tensors of a head."""
    num_target_layers = int(target.config["num_hidden_layers"])
    published = _published_config(folder)
    config = None if published else HeadConfig.read(folder)
    path = folder / _WEIGHTS
    if not path.is_file():
        raise ExportError(f"the head {folder} has no {_WEIGHTS}: train it again, or copy its whole folder")
    read_header(path)  # refuses a file that is not whole
    tensors = load_file(path)
    if config is not None:
        return config, tensors
    try:
        found = convert_head(published, tensors, num_target_layers, partial(lm_head_of, target))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ExportError(
            f"the head {folder} cannot be read: its config.json or its tensors are not as its format has them "
            f"({type(error).__name__}: {error_words(error)}); download it again"
        ) from error
    return found.config, found.tensors


def lm_head_of(target: Checkpoint) -> Tensor:
    """The target's LM head `[V, H]`; where it is tied, its embedding."""
    model = open_model(target)
    return model.stored[id(model.network.get_output_embeddings().weight)].read(torch.float32)


def _published_config(folder: Path) -> dict[str, Any]:
    """The config.json of a head that others published; empty where it is something else."""
    path = folder / "config.json"
    try:
        document = parse_json(read_text(path)) if path.is_file() else {}
    except DocumentError as error:
        raise ExportError(f"{path} {error}; train or download the head again") from error
    return document if isinstance(document, dict) and is_published(document) else {}
