"""A bundle folder whose files hold a few bytes each: enough for everything that reads only the manifest."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import describe_file
from mirrorsd.graphs.contract import DraftShape, TargetShape
from mirrorsd.graphs.manifest import (
    SCHEMA_VERSION,
    DraftBucket,
    DraftEntry,
    Exit,
    Manifest,
    Segment,
    SourceModel,
    TargetEntry,
    TokenEntry,
    VerifyResult,
)

FILES = (
    *("target/prefix.onnx", "target/exit1.onnx", "target/suffix.onnx", "target/weights.bin"),
    *("draft/draft.xml", "draft/draft.bin", "tokenizer/tokenizer.json"),
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny.mirror"
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"content of {name}".encode())
    (folder / names.MANIFEST_FILE).write_text(_manifest(folder).to_json(), encoding="utf-8")
    return folder


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Closes a folder to this user, also where that is root, whom the system never refuses."""
    looked_at, listed = Path.stat, os.scandir

    def close(folder: Path) -> None:
        def look_at(path: Path, **how: Any) -> os.stat_result:
            refuse(folder in path.parents)
            return looked_at(path, **how)

        def list_all(path: Any) -> Any:
            refuse(str(path) == str(folder))
            return listed(path)

        monkeypatch.setattr(Path, "stat", look_at)
        monkeypatch.setattr(os, "scandir", list_all)

    def refuse(is_closed: bool) -> None:
        if is_closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    return close


def _manifest(folder: Path) -> Manifest:
    target = TargetEntry(
        source=SourceModel(name="tiny-target", family="llama", licence="Apache-2.0", num_parameters=1000),
        shape=TargetShape(num_layers=2, hidden_size=8, vocab_size=32, num_kv_heads=1, head_dim=4),
        precision="fp32",
        context=64,
        segments=(
            Segment(name="prefix", file="target/prefix.onnx", first_layer=0, end_layer=1),
            Segment(name="suffix", file="target/suffix.onnx", first_layer=1, end_layer=2),
        ),
        exits=(Exit(name="exit1", file="target/exit1.onnx", layer=1, num_candidates=4, adapter_rank=0),),
        weights_file="target/weights.bin",
    )
    draft = DraftEntry(
        source=SourceModel(name="tiny-draft", family="llama", licence="Apache-2.0", num_parameters=100),
        shape=DraftShape(num_layers=1, vocab_size=32, num_kv_heads=1, head_dim=4, num_streams=2, num_candidates=4),
        precision="fp32",
        num_stream_layers=1,
        file="draft/draft.xml",
        buckets=(DraftBucket(rows=8, tips=4),),
        capacities=(64,),
    )
    verify = VerifyResult(
        stage="prefix+suffix", max_abs_error=1e-6, top1_agreement=1.0, positions=256, text="held back"
    )
    return Manifest(
        schema=SCHEMA_VERSION,
        target=target,
        draft=draft,
        tokens=TokenEntry(eos_ids=(0,), bos_id=None, pad_id=None),
        verify=(verify,),
        versions={"mirrorsd": "0"},
        files={name: describe_file(folder / name) for name in FILES},
    )
