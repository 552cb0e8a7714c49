"""Compiled drafts on disk, with the real OpenVINO: later loads compile nothing, and bad files break nothing."""

import gc
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mirrorsd.device_maps import load_device_map
from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.devices.openvino import draft_graph, draft_shapes
from mirrorsd.devices.openvino.draft_pass import run_request
from mirrorsd.devices.slot_draft import SlotDraft
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel

NUM_SHAPES = 6


@pytest.fixture(scope="module", autouse=True)
def cache_of_this_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache, so that it is known what is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("MIRRORSD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def compiled_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny bundle whose draft is compiled on disk."""
    folder = tmp_path_factory.mktemp("compiled") / "tiny.mirror"
    shutil.copytree(tiny_bundle, folder)
    assert open_draft(folder)[0].shapes.cache.num_written == NUM_SHAPES  # type: ignore[union-attr]
    return folder


def open_draft(bundle: Path) -> tuple[OpenVinoDraftModel, SlotDraft]:
    model = OpenVinoDraftModel(bundle, read_bundle(bundle).draft, load_device_map("cpu").draft)
    session = model.new_session()
    session.warm_up()
    return model, session


def open_in_f32(bundle: Path) -> tuple[OpenVinoDraftModel, SlotDraft]:
    """Two kernels round differently: in bf16 that turns near ties of a random model round."""
    placement = replace(load_device_map("cpu").draft, precision="f32")
    model = OpenVinoDraftModel(bundle, read_bundle(bundle).draft, placement)
    return model, model.new_session()


def guesses(session: SlotDraft) -> list[int]:
    return session.run([RowBlock([5, 6, 7], 0, 0)], [0, 1, 2]).ids.ravel().tolist()


def test_the_second_load_compiles_nothing_and_computes_the_same(
    compiled_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, session = open_draft(compiled_bundle)
    cache = model.shapes.cache
    assert cache is not None
    assert (cache.num_read, cache.num_written) == (NUM_SHAPES // 2, 0)
    session.prepare(session.capacity)
    assert (cache.num_read, cache.num_written) == (NUM_SHAPES, 0)
    assert not caplog.records
    model.shapes.cache = None
    fresh = OpenVinoDraftModel(compiled_bundle, model.entry, model.placement)
    fresh.shapes.cache = None
    assert guesses(fresh.new_session()) == guesses(session)


def test_blobs_hold_no_weights(compiled_bundle: Path, cache_of_this_module: Path) -> None:
    weights = (compiled_bundle / "draft" / "draft.bin").read_bytes()
    blobs = [path.read_bytes() for path in cache_of_this_module.glob("tiny.mirror-*/compiled/*.blob")]
    assert len(blobs) == NUM_SHAPES
    parts = [weights[start : start + 8192] for start in range(0, len(weights) - 8192, 4096)]
    assert len(parts) > 20
    assert not any(part in blob for part in parts for blob in blobs)


def test_every_number_of_threads_takes_the_same_blobs(compiled_bundle: Path) -> None:
    placement = replace(load_device_map("cpu").draft, threads=2, cores=())
    model = OpenVinoDraftModel(compiled_bundle, read_bundle(compiled_bundle).draft, placement)
    session = model.new_session()
    session.warm_up()
    assert model.shapes.cache is not None
    assert (model.shapes.cache.num_read, model.shapes.cache.num_written) == (NUM_SHAPES // 2, 0)
    assert guesses(session) == guesses(open_draft(compiled_bundle)[1])


def test_a_bundle_that_moves_compiles_nothing(compiled_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(compiled_bundle, tmp_path / "tiny.mirror")
    model, session = open_draft(tmp_path / "tiny.mirror")
    assert model.shapes.cache is not None
    assert (model.shapes.cache.num_read, model.shapes.cache.num_written) == (NUM_SHAPES // 2, 0)
    assert guesses(session) == guesses(open_draft(compiled_bundle)[1])


def test_a_blob_that_computes_something_else_is_not_kept(
    tiny_bundle: Path,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without `keep_small_constants`, OpenVINO reads folded numbers from the wrong place."""
    caplog.set_level("INFO")
    copy = tmp_path / "tiny.mirror"
    shutil.copytree(tiny_bundle, copy)
    monkeypatch.setattr(draft_graph, "keep_small_constants", lambda _: None)
    model, session = open_draft(copy)
    assert model.shapes.cache is not None
    assert model.shapes.cache.num_written == 0
    assert "differs from what CPU compiled" in caplog.text
    assert len(guesses(session)) > 0


def test_the_bundle_itself_is_untouched(compiled_bundle: Path) -> None:
    found = {path.relative_to(compiled_bundle).as_posix() for path in compiled_bundle.rglob("*") if path.is_file()}
    assert found == {"manifest.json", *read_bundle(compiled_bundle).files}


def test_a_blob_that_openvino_refuses_is_compiled_again(
    compiled_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "tiny.mirror"
    shutil.copytree(compiled_bundle, copy)
    model = OpenVinoDraftModel(copy, read_bundle(copy).draft, load_device_map("cpu").draft)
    cache = model.shapes.cache
    assert cache is not None
    cache.write("8x8x256", b"no blob of OpenVINO's")
    session = model.new_session()
    assert guesses(session) == guesses(open_draft(compiled_bundle)[1])
    assert "CPU does not take a blob back" in caplog.text
    assert "compiling again" in caplog.text


def test_without_a_cache_everything_works(tiny_bundle: Path, tmp_path: Path, own_cache: Path) -> None:
    copy = tmp_path / "tiny.mirror"
    shutil.copytree(tiny_bundle, copy)
    own_cache.write_text("a file is in the way", encoding="utf-8")
    model, session = open_draft(copy)
    assert model.shapes.cache is not None
    assert model.shapes.cache.num_written == 0
    session.prepare(session.capacity)
    assert len(guesses(session)) > 0


def test_one_model_for_all_shapes_says_the_same(compiled_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = guesses(open_in_f32(compiled_bundle)[1])
    monkeypatch.setattr(draft_shapes, "MOST_STATIC_BYTES", 0)
    model, session = open_in_f32(compiled_bundle)
    assert model.shapes.is_shared
    assert "one model for all shapes" in model.describe()
    assert guesses(session) == expected
    for capacity in read_bundle(compiled_bundle).draft.capacities:
        session.prepare(capacity)
    compiled = {id(model.shapes.compiled(8, 8, 256)), id(model.shapes.compiled(64, 1, 512))}
    assert len(compiled) == 1
    model.new_session().close()
    gc.collect()
    assert guesses(session) == expected


def test_a_shorter_text_moves_back_to_a_smaller_cache(compiled_bundle: Path) -> None:
    _, session = open_draft(compiled_bundle)
    fresh = open_draft(compiled_bundle)[1]
    text = [3 + 7 * i % 250 for i in range(320)]
    for start in range(0, 320, 64):
        session.run([RowBlock(text[start : start + 64], start, start)], [0])
        session.keep_rows(range(64), range(start, start + 64))
        if start == 0:
            fresh.run([RowBlock(text[:64], 0, 0)], [0])
            fresh.keep_rows(range(64), range(64))
    assert session.cache.capacity == 512
    session.forget_after(64)
    assert session.cache.capacity == 256
    block = [RowBlock([5, 6, 7], 64, 64)]
    assert session.run(block, [2]).ids.tolist() == fresh.run(block, [2]).ids.tolist()


def test_a_device_that_hangs_is_an_error() -> None:
    class Hung:
        is_cancelled = False

        def start_async(self) -> None: ...

        def wait_for(self, timeout: int) -> bool:
            assert timeout == 25
            return False

        def cancel(self) -> None:
            self.is_cancelled = True

    request = Hung()
    with pytest.raises(DeviceError, match=r"did not finish a draft pass within 0.05 s"):
        run_request(request, 0.05)  # type: ignore[arg-type]
    assert request.is_cancelled
