"""Compress the draft of a bundle that exists: everything else stays, byte by byte.

Owns: the order of the work and the new manifest. Does not own: compressing (`draft_compression.py`).
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from mirrorsd.export.compression_plan import DraftCompression
from mirrorsd.export.draft_compression import compress_draft
from mirrorsd.export.verify.draft_accuracy import LookUps, length_on, write_texts
from mirrorsd.export.verify.text import text_ids
from mirrorsd.graphs import names
from mirrorsd.graphs.atomic_folder import atomic_folder
from mirrorsd.graphs.bundle_files import describe_file, read_bundle
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import FOR_PROCESSORS, Manifest
from mirrorsd.graphs.token_rows import TokenRows


def recompress_bundle(bundle: Path, asked: DraftCompression, text: str | None = None) -> Manifest:
    """Replace the fp32 draft in `bundle` by a compressed one; the old bundle stays as it is until all is done.

    Args:
        bundle: Its folder.
        asked: How to compress.
        text: Text whose pieces the target continues; None for the built-in one.

    Raises:
        BundleError: the bundle is missing or damaged.
        ConfigError: its draft is compressed already, nncf is missing, or a form for processors is asked for.
        ExportError: too much accepted length would be lost.
    """
    if asked.weights in FOR_PROCESSORS:
        raise ConfigError(
            f"a draft in {asked.weights} is written from its checkpoint: mirrorsd export --draft-precision "
            f"{asked.weights}"
        )
    folder = bundle.resolve()
    manifest = read_bundle(folder)
    # What was compiled of the old draft is of no use to the new one.
    kept = {path: entry for path, entry in manifest.files.items() if not path.startswith(f"{names.NPU_FOLDER}/")}
    with atomic_folder(folder, overwrite=True) as copy:
        for path in (*kept, names.MANIFEST_FILE):
            _share(folder / path, copy / path)
        ids, _ = text_ids(folder / names.TOKENIZER_FOLDER / "tokenizer.json", text)
        texts = write_texts(copy, manifest.target, ids, with_calibration=asked.is_data_aware)
        draft = copy / manifest.draft.file
        table = manifest.draft.embedding
        look_up = None if table is None else TokenRows(copy, table)
        accuracy = compress_draft(draft, draft, manifest.draft, asked, texts, LookUps(look_up, look_up))
        weights = Path(manifest.draft.file).with_suffix(".bin").as_posix()
        changed = {path: describe_file(copy / path) for path in (manifest.draft.file, weights)}
        written = replace(
            manifest,
            draft=replace(manifest.draft, precision=asked.weights),
            draft_accuracy=accuracy,
            accepted_length=length_on(texts.held_back, accuracy.accepted_after),
            files=kept | changed,
        )
        (copy / names.MANIFEST_FILE).unlink()
        (copy / names.MANIFEST_FILE).write_text(written.to_json(), encoding="utf-8")
    return written


def _share(source: Path, destination: Path) -> None:
    """The same file under a second name where the disk allows it: a target may be large, and is not changed."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
