"""From two checkpoints to a bundle: the order of the whole export.

Owns: the sequence check -> load -> export -> verify -> carry over -> manifest, and progress.
Does not own: any of those steps.
"""

import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mirrorsd.export.bundle.draft_ir import draft_graph, write_draft
from mirrorsd.export.bundle.draft_onnx import write_draft_for_processors
from mirrorsd.export.bundle.journal import JOURNAL_FILE, Journal, digest_of, is_of
from mirrorsd.export.bundle.read_bytes import with_costs
from mirrorsd.export.bundle.target_graphs import WEIGHTS, TargetPlan, write_target
from mirrorsd.export.bundle.token_table import find_table
from mirrorsd.export.checkpoints.carried_files import (
    chat_entry,
    copy_licences,
    copy_tokenizer,
    exit_coverage,
    generation_defaults,
    token_entry,
)
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.loading import (
    DTYPE_BY_PRECISION,
    Streams,
    draft_shape,
    load_adapter,
    load_streams,
    target_shape,
)
from mirrorsd.export.checkpoints.weightless import WeightlessModel, open_model
from mirrorsd.export.draft_compression import compress_draft
from mirrorsd.export.integer_choice import integers_are_faster, with_integer_products
from mirrorsd.export.options import (
    ExportOptions,
    ExportProgress,
    resolve_capacities,
    with_scaling,
)
from mirrorsd.export.pair_job import PairJob, plan_job
from mirrorsd.export.verify.draft import VERIFY_TREE_PARENTS, DraftRun, compare_draft, look_up_in
from mirrorsd.export.verify.draft_accuracy import cut_texts, look_ups_of, measure_length
from mirrorsd.export.verify.head import compare_heads
from mirrorsd.export.verify.original import compare_original
from mirrorsd.export.verify.quality import (
    NUM_WINDOWS,
    calibration_text,
    measure_quality,
    reference_choices,
)
from mirrorsd.export.verify.rounded_weights import as_stored
from mirrorsd.export.verify.sensitive_layers import fitted_plan, kind_names
from mirrorsd.export.verify.target import TargetRun, compare_target, stored_reference
from mirrorsd.export.verify.text import parity_ids
from mirrorsd.export.verify.tolerances import check_parity, tolerance_of
from mirrorsd.export.weights.block_formats import FILE, FLOAT_WEIGHTS, precision_name
from mirrorsd.export.weights.gguf_blocks import FLOATS
from mirrorsd.export.weights.gguf_tensors import kinds_of
from mirrorsd.families.low_rank_head import head_width
from mirrorsd.graphs import names
from mirrorsd.graphs.atomic_folder import atomic_folder, check_space
from mirrorsd.graphs.bundle_files import describe_file
from mirrorsd.graphs.contract import TargetShape, draft_contract
from mirrorsd.graphs.manifest import (
    FOR_PROCESSORS,
    INTEGER_PRODUCTS,
    SCHEMA_VERSION,
    DraftAccuracy,
    DraftEntry,
    Manifest,
    QualityEntry,
    TargetEntry,
    VerifyResult,
    WeightStorage,
)

PARITY_POSITIONS = 320
_TRIED_ROWS = 4
_INPUTS_FOLDER = "inputs"
_UNCOMPRESSED = "draft/uncompressed.xml"
_WORK_FILES = (JOURNAL_FILE, _UNCOMPRESSED, "draft/uncompressed.bin")
_ASKED_LATER = ("overwrite", "accept_error", "draft_precision", "draft_group", "draft_data_aware", "allow_draft_loss")
"""Options that change nothing in what an export has finished: the next run may have others. The journal knows which
precision the draft was written in."""
_LEAST_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, FILE: 4}

_PACKAGES = (
    "mirrorsd",
    "torch",
    "transformers",
    "optimum",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "openvino",
    "gguf",
    "nncf",
)


def export_pair(
    target: Path, draft: Path, output: Path, options: ExportOptions, progress: ExportProgress | None = None
) -> Manifest:
    """Export `target` and `draft` into the bundle `output`, verified against PyTorch.

    The folder `output` appears only when it is complete. A killed process and a refusal leave a hidden work folder
    beside `output`, from which the next export of unchanged checkpoints goes on; after any other error or Ctrl-C
    nothing is left.

    Args:
        target: Local folder of a Hugging Face causal LM.
        draft: Local folder of a streaming draft or of any causal LM with the same tokenizer.
        output: The bundle's folder, by custom `NAME.mirror`.
        options: What is asked for.
        progress: Told about each stage; None for silence.

    Returns:
        The manifest that was written.

    Raises:
        ExportError: a checkpoint is missing, damaged, unsupported, or the two do not fit together.
        ParityError: what was exported does not compute what the checkpoint computes.
        ConfigError: the options do not fit this pair.
    """
    report = progress or _silent
    report("check", 0.0)
    job = plan_job(open_checkpoint(target, "target"), open_checkpoint(draft, "draft"), options)
    calibration_text(job.target, options.calibration_text, job.context)  # it may be refused
    digest = _digest(job)
    goes_on = partial(is_of, digest=digest)
    with atomic_folder(output, overwrite=options.overwrite, goes_on=goes_on, work_files=_WORK_FILES) as bundle:
        journal = Journal(bundle, digest)
        if journal.finished:
            report(f"going on from an earlier export, which had finished: {', '.join(journal.finished)}", 0.0)
        check_space(bundle, _least_bytes(job, journal) - sum(path.stat().st_size for path in bundle.rglob("*")))
        copy_tokenizer(job.target, bundle)
        if options.may_have_integer_products and (
            options.products == "integer"
            or journal.chosen("integer products", partial(integers_are_faster, job.target.config, job.formats))
        ):
            report = with_scaling(report)
            report("scale the inputs of integer products", 0.01)
            job = with_integer_products(job, bundle / _INPUTS_FOLDER, journal.chosen)
        # The small first: a tokenizer or draft that is refused must not cost a large target's export.
        built_draft = _build_draft(job, bundle, journal, report)
        built = _build_target(job, bundle, journal, report)
        report("carry over", 0.95)
        manifest = _finish(job, bundle, built, built_draft)
        (bundle / names.MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    report("done", 1.0)
    return manifest


class _BuiltDraft(NamedTuple):
    """What is known of the draft once it is written: its entry, its parity, what compression cost if there was any."""

    entry: DraftEntry
    results: tuple[VerifyResult, ...]
    accuracy: DraftAccuracy | None


class _BuiltTarget(NamedTuple):
    """What is known of the target once it is written: its entry, its parity, its quality."""

    entry: TargetEntry
    results: tuple[VerifyResult, ...]
    quality: QualityEntry


def _digest(job: PairJob) -> str:
    asked = asdict(job.options) | {"exit_layers": job.exit_layers, "context": job.context}
    for name in _ASKED_LATER:
        del asked[name]
    folders = (job.target.folder, job.draft.folder, *(head.folder for head in job.heads))
    return digest_of(folders, [asked, _versions()])


def _least_bytes(job: PairJob, journal: Journal) -> int:
    """Bytes of the work folder when it is fullest, at the very least: while the draft is written, or at the end."""
    bits, drafted = _LEAST_BITS[job.options.precision], job.draft.source.num_parameters
    passing = 0 if journal.get("draft") else job.options.passing_draft_bytes * drafted
    return max(passing, job.target.source.num_parameters * bits // 8 + job.options.written_draft_bytes * drafted)


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _silent(stage: str, fraction: float) -> None:
    """Draw nothing."""


def _build_target(job: PairJob, bundle: Path, journal: Journal, report: ExportProgress) -> _BuiltTarget:
    report("load target", 0.2)
    model = open_model(job.target)
    plan = _target_plan(job, target_shape(model.network, job.options.computes_in))
    calibration = calibration_text(job.target, job.options.calibration_text, job.context)
    report("compare target with transformers", 0.21)
    original = compare_original(job.target, model, calibration.measured[0])
    compared, choices = original.compared, reference_choices(original.model or model, calibration.measured)
    del original
    inputs = bundle / _INPUTS_FOLDER
    try:
        if job.options.rounding == "gptq":
            scans = job.options.head_precision == "auto"
            plan = fitted_plan(job.target, plan, model, calibration.fitted, inputs, may_scan=scans, report=report)
        model = open_model(job.target, DTYPE_BY_PRECISION[job.options.computes_in])
        write_target(model, plan, bundle, lambda name, share: report(f"export {name}", 0.25 + 0.4 * share), journal)
        report("verify target", 0.65)
        ids, text = _parity_ids(job)
        reference = stored_reference(job.target, plan, ids)
    finally:
        shutil.rmtree(inputs, ignore_errors=True)
    with journal.forgetting(WEIGHTS, names.RECURRENCE, *plan.files, *(head.name for head in plan.heads)):
        run = TargetRun(bundle, plan, in_float32=True)
        results = (*compare_target(run, reference, text), *compare_heads(run, job.target, reference, text))
        check_parity(results, tolerance_of(plan.shape.dtype, job.options.accept_error))
    report("measure quality", 0.75)
    quality = measure_quality(TargetRun(bundle, plan), choices, calibration.name)
    entry = _target_entry(job, plan)
    return _BuiltTarget(replace(entry, source=replace(entry.source, compared=compared)), results, quality)


def _target_plan(job: PairJob, shape: TargetShape) -> TargetPlan:
    return TargetPlan(
        shape=shape,
        formats=job.formats,
        context=job.context,
        num_candidates=job.options.num_exit_candidates,
        adapters={layer: load_adapter(job.target.folder, layer, shape.hidden_size) for layer in job.exit_layers},
        is_batch_invariant=job.options.is_batch_invariant,
        heads=job.heads,
    )


def _target_entry(job: PairJob, plan: TargetPlan) -> TargetEntry:
    options, formats = job.options, plan.formats
    kept, others = (kinds_of(job.target.tensors, is_kept=is_kept) for is_kept in (True, False))
    storage = WeightStorage(
        layers=options.precision,
        head=precision_name(formats.of_head, options.precision, options.computes_in),
        embedding=precision_name(formats.embedding, options.precision, options.computes_in),
        block_size=None if formats.layers is None else formats.layers.block_size or formats.layers.largest,
        is_symmetric=formats.layers is None or formats.layers.is_symmetric,
        rounding=options.rounding,
        carried=kept if options.precision == FILE else (),
        finer=tuple(kind_names(formats.apart, job.target.tensors)),
        num_rescored=formats.num_rescored,
        products=INTEGER_PRODUCTS if formats.layers is not None and formats.layers.is_by_row else "blocks",
        dequantised=others if options.precision == FILE else tuple(sorted({*kept, *others} - {*FLOATS})),
    )
    return plan.entry(job.target.source, options.precision, storage)


def _parity_ids(job: PairJob) -> tuple[list[int], str]:
    num_ids = min(PARITY_POSITIONS, job.context - len(VERIFY_TREE_PARENTS))
    return parity_ids(job.target.folder / "tokenizer.json", job.options.verify_text, num_ids)


def _build_draft(job: PairJob, bundle: Path, journal: Journal, report: ExportProgress) -> _BuiltDraft:
    report("load draft", 0.02)
    model = open_model(job.draft)
    report("compare draft with transformers", 0.03)
    window = np.array(_parity_ids(job)[0])
    compared = compare_original(job.draft, model, window).compared
    if not compared:  # a network that cannot be run is refused here rather than behind its export
        model.logits(window[window < int(job.draft.config["vocab_size"])][None, :_TRIED_ROWS])
    options, config = job.options, model.network.config
    streams = load_streams(job.draft.folder, config.hidden_size, config.num_hidden_layers, head_width(config))
    num_input_ids = int(job.target.config["vocab_size"])
    shape = draft_shape(
        model.network,
        streams,
        target_vocab_size=num_input_ids,
        num_candidates=options.num_draft_candidates,
        has_noise=options.draft_noise,
    )
    # Traced once, whether it is then written, packed for processors or both.
    graph_of = cache(partial(draft_graph, job.draft, shape, streams, context=job.context, num_input_ids=num_input_ids))
    report("export draft", 0.05)
    file, written = (
        (_UNCOMPRESSED, "fp16") if options.draft_compression else (names.DRAFT_FILE, options.draft_precision)
    )
    own, others = names.DRAFT_FILE, names.DRAFT_ONNX_FILE
    if options.draft_precision in FOR_PROCESSORS:
        own, others = others, own
    (bundle / others).unlink(missing_ok=True)  # of a run that was interrupted, and asked for another form
    if journal.get("draft") != [file, written]:
        (bundle / file).parent.mkdir(exist_ok=True)
        write_draft(graph_of(), draft_contract(shape), bundle / file, written)
        journal.record("draft", [file, written])
    entry = DraftEntry(
        source=replace(job.draft.source, compared=compared),
        shape=shape,
        precision=written,
        num_stream_layers=0 if streams is None else streams.num_stream_layers,
        file=names.DRAFT_FILE,
        buckets=options.draft_buckets,
        capacities=resolve_capacities(options.capacities, job.context),
    )
    report("verify draft", 0.12)
    with journal.forgetting("draft"):
        results = _verified_draft(job, bundle / file, entry, model, streams)
    if (asked := options.draft_compression) is None:
        return _BuiltDraft(entry, results, None)
    report("compress draft", 0.15)
    calibration = calibration_text(job.target, options.calibration_text, job.context)
    texts = cut_texts(calibration.fitted[:NUM_WINDOWS], calibration.measured, job.context)
    look_ups = look_ups_of(job.draft, job.formats, DTYPE_BY_PRECISION[options.computes_in], texts)
    pack = None
    if asked.weights in FOR_PROCESSORS:
        write = partial(write_draft_for_processors, graph_of(), shape)
        pack = partial(write, precision=asked.weights, block_size=asked.group_size)
    accuracy = compress_draft(bundle / file, bundle / own, entry, asked, texts, look_ups, pack)
    return _BuiltDraft(replace(entry, precision=asked.weights, file=own), results, accuracy)


def _verified_draft(
    job: PairJob, file: Path, entry: DraftEntry, model: WeightlessModel, streams: Streams | None
) -> tuple[VerifyResult, ...]:
    """Compare the draft in `file` with PyTorch; `model` is used up."""
    ids, text = _parity_ids(job)
    dtype = DTYPE_BY_PRECISION[entry.precision]
    look_up = look_up_in(model, ids) if entry.shape.row_width else None
    run = DraftRun(file, entry.shape, job.context, look_up)
    stored = as_stored(model, FLOAT_WEIGHTS, dtype)
    results = (compare_draft(run, stored, None if streams is None else streams.rounded(dtype), ids, text),)
    check_parity(results, tolerance_of(str(dtype).removeprefix("torch."), job.options.accept_error))
    return results


def _finish(job: PairJob, bundle: Path, target: _BuiltTarget, draft: _BuiltDraft) -> Manifest:
    """Carry over the small files, hash everything, and describe it all."""
    for checkpoint in (job.target, job.draft):
        copy_licences(checkpoint, bundle)
    entry, heads = with_costs(target.entry, tuple(head.entry for head in job.heads), bundle)
    table = find_table(bundle, entry) if draft.entry.shape.row_width else None
    paths = sorted(path for path in bundle.rglob("*") if path.is_file() and _path_in(bundle, path) not in _WORK_FILES)
    draft_entry = replace(draft.entry, embedding=table)
    return Manifest(
        schema=SCHEMA_VERSION,
        target=entry,
        draft=draft_entry,
        tokens=token_entry(job.target),
        verify=(*target.results, *draft.results),
        versions=_versions(),
        files={_path_in(bundle, path): describe_file(path) for path in paths},
        draft_accuracy=draft.accuracy,
        accepted_length=measure_length(bundle, entry, draft_entry, _parity_ids(job)[0]),
        quality=target.quality,
        exit_coverage=exit_coverage(job.target),
        generation=generation_defaults(job.target),
        chat=chat_entry(job.target, bundle),
        heads=heads,
    )


def _path_in(bundle: Path, path: Path) -> str:
    return path.relative_to(bundle).as_posix()
