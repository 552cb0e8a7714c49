"""What the export of a pair has to do: two checkpoints that fit together, and what "auto" means for them.

Owns: the checks that need only the small files of checkpoints, and the choices. Does not own: the work (`pair.py`).
"""

from dataclasses import dataclass, replace

from mirrorsd.export.checkpoints.carried_files import (
    exit_coverage,
    generation_defaults,
    tell_what_is_not_followed,
    token_entry,
)
from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.compatibility import check_compatible, with_shared_embedding
from mirrorsd.export.checkpoints.head import HeadCheckpoint, open_heads
from mirrorsd.export.checkpoints.loading import adapter_layers
from mirrorsd.export.exit_choice import choose_exit_layer
from mirrorsd.export.options import ExportOptions, check_exit_layers, resolve_context
from mirrorsd.export.weights.block_formats import FILE, WeightFormats
from mirrorsd.export.weights.gguf_tensors import FileBlocks
from mirrorsd.families.low_rank_head import HEAD_TOKENS
from mirrorsd.families.positions import most_positions, smallest_window
from mirrorsd.families.registry import FAMILIES
from mirrorsd.graphs.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PairJob:
    """Two checkpoints that fit together, and what "auto" means for them."""

    target: Checkpoint
    draft: Checkpoint
    options: ExportOptions
    formats: WeightFormats
    exit_layers: tuple[int, ...]
    context: int
    heads: tuple[HeadCheckpoint, ...]


def plan_job(target: Checkpoint, draft: Checkpoint, options: ExportOptions) -> PairJob:
    """Check that the checkpoints fit together and that the options fit them.

    Raises:
        ExportError: they do not fit together.
        ConfigError: the options do not fit this pair.
    """
    check_compatible(target, draft)
    token_entry(target), generation_defaults(target)  # refused here rather than behind the work
    tell_what_is_not_followed(target)
    draft = with_shared_embedding(draft, target)
    named = int(draft.config.get(HEAD_TOKENS) or draft.config["vocab_size"])
    vocab_size = min(int(target.config["vocab_size"]), int(draft.config["vocab_size"]), named)
    most_candidates = max(options.num_exit_candidates, options.num_draft_candidates)
    if most_candidates > vocab_size:
        raise ConfigError(f"{most_candidates} candidates were asked for; this vocabulary has {vocab_size} tokens")
    context = resolve_context(
        options.context, by_target=most_positions(target.config), by_draft=most_positions(draft.config)
    )
    window = smallest_window(draft.config)
    if window is not None and window < context:
        raise ConfigError(
            f"the draft has layers that see {window} tokens, the context is {context}: sliding windows that end within "
            f"the context are supported in targets only. Ask for a context of {window}, or take another draft"
        )
    _check_floats(target, options)
    return PairJob(
        target=target,
        draft=draft,
        options=options,
        formats=_formats(target, options),
        exit_layers=_exit_layers(target, options),
        context=context,
        heads=open_heads(options.heads, target),
    )


def _check_floats(target: Checkpoint, options: ExportOptions) -> None:
    """Refuse floats that layers cannot compute with.

    Operators of recurrent layers know float32 on the processor. In 16 bits a row alone differs from one of several, and
    an expert of a mixture has as many rows as chose it.
    """
    family = FAMILIES[str(target.config["model_type"])]
    if options.computes_in == "fp32" or (family.recurrent, family.mixture) == (None, None):
        return
    layers = "recurrent layers" if family.recurrent is not None else "experts"
    raise ConfigError(
        f"precision {options.precision!r} computes in {options.computes_in}; the {layers} of {family.model_type} "
        "compute in fp32: choose fp32, int8 or int4"
    )


def _formats(target: Checkpoint, options: ExportOptions) -> WeightFormats:
    formats = options.formats(int(target.config.get("word_embed_proj_dim") or target.config["hidden_size"]))
    formats = for_family(target, formats)
    if formats.finer and formats.row_group > 1 and options.is_batch_invariant:
        raise ConfigError(
            f"block_size is {options.block_size}, with which rows are computed in pairs; the experts of a mixture "
            "have rows one by one: choose a smaller block size, or leave it out"
        )
    if options.precision != FILE:
        return formats
    if target.gguf is None:
        raise ConfigError(
            f"precision is 'file', for the blocks of a GGUF file; {target.folder} is a folder: choose int8"
        )
    return replace(formats, carried=FileBlocks(target.tensors))


def for_family(target: Checkpoint, formats: WeightFormats) -> WeightFormats:
    """What `formats` are for the target's family.

    Experts of a mixture keep blocks whatever form other layers get, since rows reach them one by one; routers stay
    floats.
    """
    mixture = FAMILIES[target.source.family].mixture
    if mixture is None:
        return formats
    weights = [stored.name for stored in target.tensors.values()]
    formats = formats.of_single_rows
    experts = {} if formats.layers is None else dict.fromkeys(mixture.experts_of(weights), formats.layers)
    return replace(formats, finer=experts, floats=frozenset(mixture.routers_of(weights)))


def _exit_layers(target: Checkpoint, options: ExportOptions) -> tuple[int, ...]:
    num_layers = int(target.config["num_hidden_layers"])
    check_exit_layers(options.exit_layers, num_layers)
    if options.exit_layers != "auto":
        return options.exit_layers
    return (
        choose_exit_layer(
            exit_coverage(target),
            num_layers,
            with_adapter=adapter_layers(target.folder, num_layers),
            num_candidates=options.num_exit_candidates,
        ),
    )
