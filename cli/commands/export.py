"""`mirrorsd export`: a target and a draft to a mirror bundle."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mirrorsd.cli.commands.compile import accuracy_line, check_shapes, print_checks, report
from mirrorsd.cli.commands.inspect import compared_words, precision_line, quality_line
from mirrorsd.cli.input import options
from mirrorsd.cli.input.given_text import given_text
from mirrorsd.cli.output.console import as_word, note, print_json, show_share
from mirrorsd.cli.output.failures import EXIT_FAILED
from mirrorsd.graphs.errors import ConfigError, DeviceError, ExportError
from mirrorsd.graphs.manifest import FOR_PROCESSORS, IN_ROWS
from mirrorsd.graphs.quality_bounds import warnings_of

if TYPE_CHECKING:
    from mirrorsd.device_maps import DeviceMap
    from mirrorsd.export import ExportOptions
    from mirrorsd.graphs import Manifest
    from mirrorsd.graphs.manifest import QualityEntry

_GGUF = ".gguf"

Target = Annotated[
    str,
    typer.Argument(help="The target: a folder, a GGUF file, or a name on the hub.", show_default=False),
]
Draft = Annotated[str, typer.Option(help="The draft: a folder, a GGUF file, a name, or auto: the known one.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="The bundle; without it, named after the target.")]
CardName = Annotated[str | None, typer.Option(help="A card to export for; auto is this machine's.", show_default=False)]

Precision = Annotated[
    options.TargetPrecision, typer.Option(help="The target's weights; file: the blocks of a GGUF file as they are.")
]
BlockSize = Annotated[
    int | None,
    typer.Option(help="Integer weights that share a scale: 32, 64, 128; int4 has 32, int8 what the embedding takes."),
]
Asymmetric = Annotated[
    bool | None, typer.Option("--asymmetric/--symmetric", help="Integer weights with zero points; int4 has them.")
]
BatchInvariant = Annotated[
    bool, typer.Option(help="On a CPU, the same bits for a row in passes of any number of rows.")
]
Heads = Annotated[
    list[str] | None,
    typer.Option(help="A head of the target: a folder or a name on the hub; may be repeated.", show_default=False),
]


def export(
    target: Target,
    draft: Draft = "auto",
    output: Output = None,
    exit_layer: Annotated[str, typer.Option(help="auto, a layer, or several: 4,6.")] = "auto",
    precision: Precision = "int8",
    compute: options.Compute = "auto",
    head_precision: options.HeadPrecision = "auto",
    embedding_precision: options.EmbeddingPrecision = "auto",
    block_size: BlockSize = None,
    asymmetric: Asymmetric = None,
    batch_invariant: BatchInvariant = True,
    products: options.Products = "auto",
    rounding: options.Rounding = "nearest",
    calibration: Annotated[
        Path | None, typer.Option(help="Text to report quality on, and for gptq.", show_default=False)
    ] = None,
    draft_precision: options.DraftWeights = "auto",
    draft_group: options.DraftGroup = 128,
    draft_data_aware: options.DraftDataAware = False,
    allow_draft_loss: options.AllowDraftLoss = False,
    draft_noise: options.DraftNoise = "auto",
    context: Annotated[int | None, typer.Option(help="Longest text in tokens; at most 2048 without it.")] = None,
    device_map: CardName = None,
    head: Heads = None,
    accept_error: options.AcceptError = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a bundle that is there.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Export a target and its draft, check them against PyTorch, and write a bundle."""
    device_map = card_of_this_machine() if device_map == "auto" else device_map
    if device_map is not None:
        compute = check_device_map(device_map, precision, compute)
        products = products_for(device_map, precision, products)
    from mirrorsd.export import ExportOptions

    chosen = ExportOptions(
        exit_layers=read_exit_layers(exit_layer),
        precision=precision,
        compute=compute,
        head_precision=head_precision,
        embedding_precision=embedding_precision,
        block_size=block_size,
        is_symmetric=None if asymmetric is None else not asymmetric,
        is_batch_invariant=batch_invariant,
        products=products,
        rounding=rounding,
        calibration_text=given_text(calibration, "--calibration"),
        draft_precision=draft_weights_for(device_map, draft_precision),
        draft_group=draft_group,
        draft_data_aware=draft_data_aware,
        allow_draft_loss=allow_draft_loss,
        draft_noise=options.read_choice(draft_noise),
        context=context,
        accept_error=accept_error,
        heads=tuple(head or ()),
        overwrite=overwrite,
    )
    place = output or Path(f"{model_name(target)}-{precision}.mirror")
    present(place, write_bundle(target, draft, place, chosen), device_map, as_json=as_json)


def model_name(target: str) -> str:
    """What a bundle is called after: the last part of a path or of a hub name, without a file's ending.

    >>> model_name("Qwen/Qwen3-8B@main"), model_name("o/n/Q4.gguf"), model_name("./no@folder")
    ('Qwen3-8B', 'Q4', 'no@folder')
    """
    from mirrorsd.hub.checkpoints import parse_name

    path, name = Path(target), parse_name(target)
    if path.exists() or name is None:
        called = (path.resolve() if path.name in ("", "..") else path).name  # a link has a name of its own
    else:
        called = PurePosixPath(name.file or name.repository).name
    return called[: -len(_GGUF)] if called.lower().endswith(_GGUF) else called


def write_bundle(target: str, draft: str, place: Path, chosen: "ExportOptions") -> "Manifest":
    """Find both models, say what the export will take, and export them; what is refused is refused before a fetch."""
    from mirrorsd.export import export_pair
    from mirrorsd.graphs.atomic_folder import check_place
    from mirrorsd.hub.checkpoints import look_at

    check_place(place, overwrite=chosen.overwrite)
    for head in chosen.heads:
        look_at(head)
    target_path, draft_path = locate_pair(target, draft)
    chosen = replace(chosen, heads=locate_heads(chosen.heads))
    note_estimate(target_path, draft_path, place, chosen)
    with show_share("exporting") as show:
        return export_pair(target_path, draft_path, place, chosen, show)


def locate_pair(target: str, draft: str) -> tuple[Path, Path]:
    """Where the two checkpoints are, fetched from the hub where they are names.

    Raises:
        ConfigError: `auto`, and no draft is known for this target.
        ExportError: a name that the hub does not give, or a model that cannot be exported.
    """
    from mirrorsd.export.pairs import draft_for
    from mirrorsd.hub.checkpoints import locate, origin_of, parse_name

    if draft == "auto":
        name, origin = parse_name(target), origin_of(Path(target))
        is_name = name is not None and not Path(target).exists()
        draft = draft_for(name.repository if is_name and name else origin.repository if origin else target)
        note(f"draft: {draft}")
    refuse_early(target, "target")
    refuse_early(draft, "draft")
    return locate(target, note), locate(draft, note)


def refuse_early(text: str, role: Literal["target", "draft"]) -> None:
    """Refuse a model by its small files, while nothing large has been fetched for it or for the other one.

    Raises:
        ExportError: a name that the hub does not give, or a model that cannot be exported.
    """
    from mirrorsd.export.checkpoints.checkpoint import check_config, open_checkpoint
    from mirrorsd.hub.checkpoints import FORMS, look_at, parse_name

    if (path := Path(text)).exists():
        open_checkpoint(path, role)
    elif parse_name(text) is None:
        raise ExportError(f"the {role} {text} is no folder or file here, and no name on the hub: that is {FORMS}")
    elif (folder := look_at(text)) is not None:
        check_config(folder, role)


def locate_heads(heads: Sequence[str]) -> tuple[str, ...]:
    """Where heads are, fetched from the hub where they are names.

    Raises:
        ExportError: a name that the hub does not give.
    """
    from mirrorsd.hub.checkpoints import locate

    return tuple(str(locate(head, note)) for head in heads)


def note_estimate(target: Path, draft: Path, output: Path, chosen: "ExportOptions") -> None:
    """Say what the export will take, and what there is too little of."""
    from mirrorsd.export.estimate import estimate_export, shortages
    from mirrorsd.machine.doctor.memory import SYSTEM, free_memory

    estimate = estimate_export(target, draft, chosen)
    note(f"{output}: takes {estimate}")
    for shortage in shortages(estimate, output, free_memory(SYSTEM)):
        note(f"warning: {shortage}")


def present(output: Path, manifest: "Manifest", device_map: str | None, *, as_json: bool) -> None:
    """Show what was written and how good it is; compile the draft for a card whose devices are here.

    Raises:
        typer.Exit: a shape of the draft could not be compiled.
    """
    if not as_json:
        print("\n".join(summary_lines(output, manifest)))
    if manifest.target.shape.dtype == "bfloat16":
        note("the target computes in bfloat16: it runs on ONNX Runtime's CUDAExecutionProvider and on nothing else")
    for warning in warnings_of(manifest):
        note(f"warning: {warning}")
    is_compiled = not manifest.draft.is_for_processors
    if device_map is None and is_compiled and not as_json:
        note_faster_draft()
    card = present_card(device_map) if device_map and is_compiled else None
    checks = check_shapes(output, card) if card else []
    if as_json:
        shapes = {"compile": report(output, card, checks)} if card else {}
        print_json(summary_document(output, manifest) | shapes)
    elif card:
        print_checks(card, checks)
    if not all(check.is_fine for check in checks):
        raise typer.Exit(EXIT_FAILED)


def card_of_this_machine() -> str:
    """The card that `auto` takes on this machine.

    Raises:
        DeviceError: none fits.
    """
    from mirrorsd.devices.inventory import choose_device_map

    name = choose_device_map("auto").device_map.name
    note(f"device map {name}: what fits this machine")
    return name


def note_faster_draft() -> None:
    """Say what makes drafts faster on this machine, where its processor runs them."""
    from mirrorsd.devices.inventory import choose_device_map

    try:
        card = choose_device_map("auto").device_map
    except DeviceError:  # exported here, and run elsewhere
        return
    if card.draft.device == "CPU":
        note(
            f"this machine runs drafts on its processor (device map {card.name}): with --device-map auto the draft "
            "gets weights that are multiplied faster there, and runs on no other device"
        )


def present_card(name: str) -> "DeviceMap | None":
    """The card to compile for; None, and a note that says why, where its devices are not here."""
    from mirrorsd.runtime import choose_device_map

    try:
        return choose_device_map(name).device_map
    except DeviceError as error:
        note(f"not compiled, since the device is not here (`mirrorsd compile` does it there): {error}")
        return None


def read_exit_layers(text: str) -> Literal["auto"] | tuple[int, ...]:
    """Read `auto`, `4` or `4,6`.

    Raises:
        ConfigError: anything else.
    """
    if text == "auto":
        return "auto"
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--exit-layer is {text!r}; allowed: auto, a layer such as 4, or several: 4,6.") from error


def draft_weights_for(name: str | None, asked: options.DraftPrecision) -> str:
    """The draft's weights: `auto` is integers by row where the card `name` has the draft on a processor.

    Raises:
        ConfigError: no such card, a card with mistakes, or a form for processors where the draft is elsewhere.
    """
    from mirrorsd.device_maps import load_device_map

    draft = None if name is None else load_device_map(name).draft
    if draft is None:
        return "fp32" if asked == "auto" else asked
    is_on_processor = draft.device == "CPU"
    if asked in FOR_PROCESSORS and not is_on_processor:
        raise ConfigError(
            f"--device-map {name} has the draft on {draft.device}, and one in {asked} is for a processor: leave the "
            "device map out, or choose another --draft-precision"
        )
    weights = (IN_ROWS if is_on_processor else "fp32") if asked == "auto" else asked
    if weights in FOR_PROCESSORS:
        note(
            f"device map {name}: the draft in {weights}, for processors alone (--draft-precision fp32: for any device)"
        )
    else:
        note(f"device map {name}: the draft is compiled for it; the bundle is not bound to it")
    return weights


def check_device_map(name: str, precision: str, compute: options.ComputeName = "auto") -> options.ComputeName:
    """Say what the target is to compute in: integer weights compute in fp16 where the card's device knows only that.

    Raises:
        ConfigError: no such card, or a card with mistakes.
        DeviceError: its target does not compute in what a target of this precision computes in.
    """
    from mirrorsd.device_maps import load_device_map
    from mirrorsd.devices.inventory import cannot_compute, check_computes

    card = load_device_map(name)
    dtypes = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    if compute == "auto" and precision in ("int8", "int4") and cannot_compute(card, "float32"):
        compute = "fp16"
        note(f"device map {card.name}: the target computes in fp16 (--compute says otherwise)")
    check_computes(card, dtypes.get(precision if compute == "auto" else compute, "float32"))
    return compute


def products_for(name: str, precision: str, products: options.ProductsName) -> options.ProductsName:
    """What form int8 products may have on a card's target.

    Raises:
        DeviceError: integers were asked for, and are not for this card.
    """
    from mirrorsd.device_maps import load_device_map
    from mirrorsd.devices.inventory import cannot_compute, check_computes

    card = load_device_map(name)
    if products == "integer":
        check_computes(card, "integers")
    if precision == "int8" and products == "auto" and cannot_compute(card, "integers"):
        note(f"device map {card.name}: products of blocks (integers by row are for processors)")
        return "blocks"
    return products


def summary_lines(output: Path, manifest: "Manifest") -> list[str]:
    """What was written, and how exactly it agrees with PyTorch on the same rounded weights."""
    lines = [
        f"{result.stage}: largest error {result.max_abs_error:.1e} ({result.max_relative_error:.1e} standard "
        f"deviations), same top-1 at {result.top1_agreement:.1%} of {result.positions} positions"
        for result in manifest.verify
    ]
    sources = {"target": manifest.target.source, "draft": manifest.draft.source}
    words = [f"{role}: {compared_words(source)}" for role, source in sources.items()]
    lines.append(f"compared with transformers: {', '.join(words)}")
    if manifest.draft_accuracy is not None:
        lines.append(accuracy_line(manifest.draft_accuracy))
    if manifest.target.storage is not None:
        lines.append(f"weights: {precision_line(manifest.target)}")
    if manifest.quality:
        lines.append(f"against fp32: {quality_line(manifest.quality)}")
    verdict = f": {quality_verdict(manifest.quality)}" if manifest.quality else ""
    return [*lines, f"wrote {output}{verdict}", f'next: mirrorsd generate {as_word(output)} "Once upon a time"']


def quality_verdict(quality: "QualityEntry") -> str:
    """How near the exported target is to the original, in words."""
    share = f"{quality.top1_agreement:.1%} of the best tokens"
    if quality.top1_agreement >= 0.995:
        return f"texts are the original's: {share}"
    if quality.top1_agreement >= 0.9:
        return f"texts like the original's: {share}"
    return f"texts differ from the original's: only {share}; a finer --precision keeps more"


def summary_document(output: Path, manifest: "Manifest") -> dict[str, Any]:
    """The same for programs."""
    return {
        "bundle": str(output),
        "verify": [asdict(result) for result in manifest.verify],
        "quality": asdict(manifest.quality) if manifest.quality else None,
        "warnings": list(warnings_of(manifest)),
    }
