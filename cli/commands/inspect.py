"""`mirrorsd inspect`: what a bundle contains, from its manifest and what compilers said of its draft."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mirrorsd.cli.commands.compile import accuracy_line
from mirrorsd.cli.commands.npu import print_reports
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import add_row, print_json, print_table, visible
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.manifest import INTEGER_PRODUCTS, Manifest, QualityEntry, SourceModel, TargetEntry
from mirrorsd.graphs.quality_bounds import warnings_of

if TYPE_CHECKING:
    from mirrorsd.machine.npu.compiler import ShapeReport


def inspect(bundle: options.Bundle, as_json: options.AsJson = False) -> None:
    """Show what a bundle contains, after checking its files."""
    manifest = read_bundle(bundle)
    reports = _npu_reports(bundle)
    if as_json:
        of_npus = {name: [asdict(report) for report in found] for name, found in reports.items()}
        print_json(asdict(manifest) | ({"npu": of_npus} if of_npus else {}))
        return
    for table in (_model_table(manifest), _stage_table(manifest), _verify_table(manifest), _file_table(manifest)):
        print_table(table)
    if manifest.chat is not None:
        values = ", ".join(f"{name} {value}" for name, value in manifest.chat.generation.items())
        print(visible(f"Chats take {values} ({manifest.chat.source})"))
    if manifest.draft_accuracy is not None:
        print(visible(accuracy_line(manifest.draft_accuracy)))
    if manifest.quality:
        print(visible(f"Quality against fp32: {quality_line(manifest.quality)}"))
    for warning in warnings_of(manifest):
        print(f"warning: {warning}")
    if coverage_rows(manifest.exit_coverage):
        print_table(_coverage_table(manifest))
    print_reports(reports)


def _model_table(manifest: Manifest) -> Table:
    table = Table("", "target", "draft", title="Models", title_justify="left")
    target, draft, shape = manifest.target, manifest.draft, manifest.target.shape
    streams = f"{draft.shape.num_streams} in the top {draft.num_stream_layers} layers"
    rows = (
        ("source", target.source.name, draft.source.name),
        ("family", target.source.family, draft.source.family),
        ("compared", compared_words(target.source), compared_words(draft.source)),
        ("licence", target.source.licence, draft.source.licence),
        ("parameters", f"{target.source.num_parameters:,}", f"{draft.source.num_parameters:,}"),
        ("precision", precision_line(target), draft.precision),
        ("layers", str(target.shape.num_layers), str(draft.shape.num_layers)),
        *([("experts", f"{shape.num_experts}, {shape.num_active} for a row", "")] if shape.num_experts else []),
        ("vocabulary", f"{target.shape.vocab_size:,}", f"{draft.shape.vocab_size:,}"),
        ("context", str(target.context), ", ".join(map(str, draft.capacities))),
        ("streams", "", streams if draft.shape.num_streams else "none"),
        ("buckets (rows x tips)", "", ", ".join(f"{bucket.rows}x{bucket.tips}" for bucket in draft.buckets)),
    )
    for row in rows:
        add_row(table, *row)
    return table


def precision_line(target: TargetEntry) -> str:
    """The target's precision with everything that was chosen about its weights."""
    storage = target.storage
    if storage is not None and target.precision == "file":
        kept, others = " and ".join(storage.carried), " and ".join(storage.dequantised)
        rounded = f"{others} rounded to 8 bits in blocks of {storage.block_size}" if others else ""
        as_it_is = f"{kept} as {'they are' if len(storage.carried) > 1 else 'it is'}" if kept else ""
        return f"file ({', '.join(part for part in (as_it_is, rounded) if part)})"
    if storage is None or not any(part.startswith("int") for part in (storage.layers, storage.head, storage.embedding)):
        return f"{target.precision} (CUDA only)" if target.shape.dtype == "bfloat16" else target.precision
    zero_points = "symmetric" if storage.is_symmetric else "with zero points"
    computes = "" if target.shape.dtype == "float32" else f"; computes in {target.shape.dtype}"
    blocks = f"blocks of {storage.block_size or 'up to 128'}"
    if storage.products == INTEGER_PRODUCTS:
        blocks = f"products of integers by row, others in {blocks}"
    finer = "".join(f"{_product(name)} int8, " for name in storage.finer)
    again = f" with the best {storage.num_rescored} again in {storage.embedding}" if storage.num_rescored else ""
    return (
        f"{storage.layers} ({finer}head {storage.head}{again}, embedding {storage.embedding}; {blocks}, {zero_points}, "
        f"rounded by {storage.rounding}{computes})"
    )


def _product(name: str) -> str:
    """A kind of product in words.

    >>> _product("model.layers.*.mlp.down_proj.weight"), _product("model.layers.0-3,9.mlp.down_proj.weight")
    ('mlp.down_proj', 'mlp.down_proj of layers 0-3,9')
    """
    whole = name.removesuffix(".weight").split("*.")[-1]
    return re.sub(r"^\D*(\d[\d,-]*)\.(.+)$", r"\2 of layers \1", whole)


def compared_words(source: SourceModel) -> str:
    """How far the export compared a checkpoint with what transformers loads."""
    return {"logits": "tensors and logits", "tensors": "tensors"}.get(source.compared, "no")


def quality_line(quality: QualityEntry) -> str:
    """What a precision costs, in one line."""
    return (
        f"perplexity {quality.perplexity:.2f} (fp32 {quality.reference_perplexity:.2f}), same best token at "
        f"{quality.top1_agreement:.1%} of {quality.positions} positions, divergence {quality.mean_divergence:.3f} "
        f"nats, text: {quality.text}"
    )


def _npu_reports(bundle: Path) -> "dict[str, list[ShapeReport]]":
    """What the NPU compiler said of the draft, by platform; nothing is imported where it was never asked."""
    if not (bundle / names.NPU_FOLDER).is_dir():
        return {}
    from mirrorsd.machine.npu.report import read_reports

    return read_reports(bundle)


def _stage_table(manifest: Manifest) -> Table:
    table = Table("stage", "layers", "file", title="Stages", title_justify="left")
    for segment in manifest.target.segments:
        add_row(table, segment.name, f"{segment.first_layer}-{segment.end_layer - 1}", segment.file)
    for point in manifest.target.exits:
        adapter = f"adapter of rank {point.adapter_rank}" if point.adapter_rank else "no adapter"
        add_row(table, point.name, f"after {point.layer} ({adapter}, top {point.num_candidates})", point.file)
    for head in manifest.heads:
        taps = ", ".join(map(str, head.shape.taps))
        what = f"after {taps} ({head.shape.length} tokens, {head.vocabulary} vocabulary of {head.num_tokens:,})"
        add_row(table, names.head_name(head.kind), what, head.file)
    add_row(table, "draft", f"0-{manifest.draft.shape.num_layers - 1}", manifest.draft.file)
    return table


def _verify_table(manifest: Manifest) -> Table:
    table = Table("stage", "largest error", "same top-1", "positions", "text", title="Verify", title_justify="left")
    for result in manifest.verify:
        agreement = f"{result.top1_agreement:.1%}"
        add_row(table, result.stage, f"{result.max_abs_error:.1e}", agreement, str(result.positions), result.text)
    return table


def _file_table(manifest: Manifest) -> Table:
    table = Table("file", "size", "SHA-256", title="Files", title_justify="left")
    for name, entry in manifest.files.items():
        add_row(table, name, readable_size(entry.bytes), entry.sha256[:12])
    add_row(table, "all", readable_size(sum(entry.bytes for entry in manifest.files.values())), "")
    return table


def _coverage_table(manifest: Manifest) -> Table:
    """How often the target's own choice is among an exit's best."""
    coverage = manifest.exit_coverage
    rows = coverage_rows(coverage)
    ranks = list(dict.fromkeys(rank for _, _, shares in rows for rank in shares))
    title = f"Exit coverage ({coverage.get('positions', '?')} positions)"
    table = Table("layer", "exit", *(f"top {rank}" for rank in ranks), title=title, title_justify="left")
    for layer, kind, shares in rows:
        add_row(table, layer, kind, *(f"{shares[rank]:.1%}" if rank in shares else "-" for rank in ranks))
    return table


def coverage_rows(coverage: dict[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    """Layer, kind of exit, and shares by rank, of what the training measured; empty where it has another form.

    >>> coverage_rows({"positions": 9, "layers": {"3": {"adapter": {"1": 0.5, "4": 0.8}}}})
    [('3', 'adapter', {'1': 0.5, '4': 0.8})]
    """
    layers = coverage.get("layers")
    if not isinstance(layers, dict):
        return []
    return [
        (layer, kind, shares)
        for layer, kinds in layers.items()
        if isinstance(kinds, dict)
        for kind, shares in kinds.items()
        if isinstance(shares, dict) and all(isinstance(share, int | float) for share in shares.values())
    ]


def readable_size(num_bytes: int) -> str:
    """A size with a binary unit.

    >>> readable_size(512), readable_size(3 << 20)
    ('512 B', '3.0 MiB')
    """
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    return f"{size:.1f} {unit}"
