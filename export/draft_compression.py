"""The draft's weights as int8 or int4, and what that costs: agreement with itself, and accepted length on real text.

Owns: nncf's calls, and the refusal. Does not own: what may be asked for (`compression_plan.py`), the texts and their
measurement (`draft_accuracy.py`), the uncompressed draft (`draft_ir.py`).
"""

import contextlib
import importlib
import importlib.util
import io
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from mirrorsd.devices.openvino.core import new_core, on_a_thread_that_ends
from mirrorsd.devices.openvino.saved_graph import save_graph
from mirrorsd.export.compression_plan import COMPRESSED, DraftCompression
from mirrorsd.export.verify.draft import DraftRun
from mirrorsd.export.verify.draft_accuracy import (
    NO_LOOK_UPS,
    TEXT_IDS,
    DraftTexts,
    LookUps,
    compare_drafts,
    draft_inputs,
)
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.manifest import IN_ROWS, DraftAccuracy, DraftEntry
from mirrorsd.graphs.quality_bounds import SMALLEST_ACCEPTED_SHARE, is_surely_lossy, loss_line


def compress_draft(
    source: Path,
    path: Path,
    draft: DraftEntry,
    asked: DraftCompression,
    texts: DraftTexts,
    look_ups: LookUps = NO_LOOK_UPS,
    pack: Callable[[Path], None] | None = None,
) -> DraftAccuracy:
    """Compress the fp32 draft `source`, and measure what that costs.

    Args:
        source: The draft's IR.
        path: Where the compressed IR goes; may be `source`.
        draft: The draft; its weights are floats.
        asked: How to compress.
        texts: One half is for calibration, the other is held back and measured on.
        look_ups: Of the tokens' rows, where the draft has none of its own.
        pack: Writes the compressed draft, where it is no IR.

    Returns:
        What compression costs. `path` now holds the compressed weights.

    Raises:
        ConfigError: the draft is compressed already, or nncf is not installed.
        ExportError: too much of the accepted length is surely lost and `asked` does not allow it; nothing is written.
    """
    if draft.precision in COMPRESSED:
        raise ConfigError(
            f"the draft's weights are {draft.precision} already; compress one that was exported in fp32 "
            "(mirrorsd export --draft-precision fp32)"
        )
    samples = None
    if asked.is_data_aware:
        samples = list(draft_inputs(DraftRun(source, draft.shape, TEXT_IDS, look_ups.stored), texts.for_calibration))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compressed-") as folder:
        halved, partial = Path(folder) / "halved.xml", Path(folder) / path.name
        if pack is not None:
            pack(partial)
        else:
            if draft.precision == "fp32":  # what is left in floating point needs no more than 16 bits
                save_graph(new_core().read_model(source), halved, in_fp16=True)
            _write_compressed(halved if draft.precision == "fp32" else source, partial, asked, samples)
        accuracy = compare_drafts(source, partial, draft, texts, asked.scheme, look_ups)
        _check_loss(accuracy, asked)
        for name in (path.with_suffix(".bin").name, path.name):
            (partial.parent / name).replace(path.parent / name)
    return accuracy


def _write_compressed(
    halved: Path, compressed: Path, asked: DraftCompression, samples: Sequence[dict[str, Any]] | None
) -> None:
    """Compress the draft `halved`, whose weights are mapped, and take memory only until this returns."""
    model = compress_weights(new_core().read_model(halved), asked, samples)
    save_graph(model, compressed, in_fp16=False)


def _check_loss(accuracy: DraftAccuracy, asked: DraftCompression) -> None:
    if asked.allows_loss or not is_surely_lossy(accuracy):
        return
    gentler = {"int8": "fp16", IN_ROWS: "--draft-precision fp32"}.get(
        asked.weights, "int8, a smaller --draft-group or --draft-data-aware (int4)"
    )
    raise ExportError(
        f"{loss_line(accuracy)}; at least {SMALLEST_ACCEPTED_SHARE:.0%} are wanted. What is finished is kept: choose "
        f"{gentler}, or keep this draft with --allow-draft-loss"
    )


def compress_weights(
    model: ov.Model, asked: DraftCompression, samples: Sequence[dict[str, Any]] | None = None
) -> ov.Model:
    """Compress the weights of `model` (which is used up); tables that are no weights stay as they are.

    Embedding and head are rounded more finely than layers of four bits, as near ties between tokens are decided there:
    they have eight.

    Raises:
        ConfigError: nncf is not installed.
    """
    if importlib.util.find_spec("nncf") is None:
        raise ConfigError(f"an {asked.weights} draft needs nncf: pip install 'mirrorsd[compress]', or choose fp16")
    return on_a_thread_that_ends(lambda: _compressed_by_nncf(model, asked, samples))


def _compressed_by_nncf(model: ov.Model, asked: DraftCompression, samples: Sequence[dict[str, Any]] | None) -> ov.Model:
    nncf = importlib.import_module("nncf")
    tables = nncf.IgnoredScope(names=_position_tables(model), validate=False)
    with _quiet(nncf):
        if asked.weights == "int8":
            return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=tables)
        fallbacks = importlib.import_module("nncf.quantization.advanced_parameters")
        settings = {"mode": nncf.CompressWeightsMode.INT4_SYM, "ratio": 1.0, "ignored_scope": tables}
        aware = {"dataset": nncf.Dataset(samples), "awq": True, "scale_estimation": True} if samples else {}
        grouped = nncf.compress_weights(
            model,
            group_size=asked.group_size,
            backup_mode=nncf.BackupMode.INT8_SYM,
            advanced_parameters=fallbacks.AdvancedCompressionParameters(
                group_size_fallback_mode=fallbacks.GroupSizeFallbackMode.IGNORE
            ),
            **settings,
            **aware,
        )
        # What no group fits was left alone: one scale per row there.
        return nncf.compress_weights(grouped, group_size=-1, all_layers=True, **settings)


def _position_tables(model: ov.Model) -> list[str]:
    """Look-ups in tables of cosines and sines, which nncf would round as it rounds embeddings."""
    return [
        operation.get_friendly_name()
        for operation in model.get_ops()
        if operation.get_type_name() == "Gather" and _table_of(operation).get_friendly_name().startswith("rotary.")
    ]


def _table_of(look_up: ov.Node) -> ov.Node:
    """What is looked up in: a constant, widened or not, or something that is computed."""
    node = look_up.input_value(0).get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return node


@contextlib.contextmanager
def _quiet(nncf: Any) -> Iterator[None]:
    """Keep nncf's table, bar and remarks off the terminal."""
    logger = logging.getLogger(nncf.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
