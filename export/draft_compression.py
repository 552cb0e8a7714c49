"""The draft's weights as int8 or int4, and what that costs: agreement with itself, and accepted length on real text.

Owns: nncf's calls, and the refusal. Does not own: what may be asked for (`compression_plan.py`), the texts and their
measurement (`draft_accuracy.py`), the uncompressed draft (`draft_ir.py`).
"""

import contextlib
import importlib
import importlib.util
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openvino as ov

from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.manifest import DraftAccuracy, DraftEntry

from .compression_plan import DraftCompression
from .draft_accuracy import TargetTexts, compare_drafts, draft_inputs

MAX_LOSS = 0.03
"""Share of the accepted length that compression may cost."""


def compress_draft(bundle: Path, draft: DraftEntry, asked: DraftCompression, texts: TargetTexts) -> DraftAccuracy:
    """Compress the fp32 draft that lies in the folder `bundle`, and measure what that costs.

    Args:
        bundle: A bundle being made: its stages and its draft are there, its manifest need not be.
        draft: The draft; its weights are fp32.
        asked: How to compress.
        texts: What the target wrote: one half is for calibration, the other is held back and measured on.

    Returns:
        What compression costs. The draft's files now hold the compressed weights.

    Raises:
        ConfigError: the draft is compressed already, or nncf is not installed.
        ExportError: more than `MAX_LOSS` of the accepted length is lost and `asked` does not allow it; the draft's
            files are those of before.
    """
    if draft.precision != "fp32":
        raise ConfigError(
            f"the draft's weights are {draft.precision} already; compress one that was exported in fp32 "
            "(mirrorsd export --draft-precision fp32)"
        )
    model = ov.Core().read_model(bundle / draft.file)
    samples = list(draft_inputs(model, draft, texts.for_calibration)) if asked.is_data_aware else None
    compressed = compress_weights(ov.Core().read_model(bundle / draft.file), asked, samples)
    accuracy = compare_drafts(model, compressed, draft, texts, asked.scheme)
    if accuracy.accepted_share < 1 - MAX_LOSS and not asked.allows_loss:
        raise ExportError(
            f"{asked.scheme} weights keep {accuracy.accepted_share:.1%} of the draft's accepted length "
            f"({accuracy.accepted_after:.2f} of {accuracy.accepted_before:.2f} tokens over {accuracy.num_windows} "
            f"windows); at least {1 - MAX_LOSS:.0%} are wanted. Nothing was written: choose int8, a smaller group or "
            "--draft-data-aware, or allow it with --allow-draft-loss"
        )
    _replace(compressed, bundle / draft.file)
    return accuracy


def _replace(model: ov.Model, xml_path: Path) -> None:
    """Write beside and rename: `model` may still read the old file."""
    partial = xml_path.with_name(f"{xml_path.stem}-compressed.xml")
    ov.save_model(model, partial, compress_to_fp16=False)
    for suffix in (".bin", ".xml"):
        partial.with_suffix(suffix).replace(xml_path.with_suffix(suffix))


def compress_weights(
    model: ov.Model, asked: DraftCompression, samples: Sequence[dict[str, Any]] | None = None
) -> ov.Model:
    """Compress the weights of `model` (which is used up); tables that are no weights stay as they are.

    int4 leaves embedding and head in int8: their rows are tokens, and a token's row is all there is of it.

    Raises:
        ConfigError: nncf is not installed.
    """
    if importlib.util.find_spec("nncf") is None:
        raise ConfigError(f"an {asked.weights} draft needs nncf: pip install nncf, or choose fp16")
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
        if operation.get_type_name() == "Gather"
        and operation.input_value(0).get_node().get_friendly_name().startswith("rotary.")
    ]


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
