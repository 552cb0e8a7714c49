"""What a target's session holds on to: one buffer for all row counts, and the bindings that were used last."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime import device as onnx_device
from mirrorsd.devices.onnxruntime.stage import Place
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.runtime.backends.onnxruntime.bound_pass import BoundPass
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger


@pytest.fixture(params=["host", "device"])
def session(tiny_bundle: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnnxTarget]:
    if request.param == "device":
        monkeypatch.setattr(onnx_device, "place_of", lambda _: Place(kind="cpu", is_device=True))
    session = OnnxTargetModel(tiny_bundle, read_bundle(tiny_bundle).target, TargetPlacement()).new_session()
    yield session
    session.close()


def logits(session: OnnxTarget, tokens: np.ndarray, start: int = 0) -> np.ndarray:
    found = session.run(tokens, start, with_logits=True, ledger=Ledger(), on_exit=lambda _: None).logits
    assert found is not None
    return found.copy()


def test_all_row_counts_share_one_buffer(session: OnnxTarget) -> None:
    tokens = np.random.default_rng(0).integers(0, session.vocab_size, 32)
    alone = [logits(session, tokens[:size]) for size in range(1, 33)]
    bound = list(session._passes.bound.values())
    assert len(bound) == 32
    assert len({one._answer._logits.value.data_ptr() for one in bound}) == 1
    assert len({one.segments[0].hidden.value.data_ptr() for one in bound if one.segments[0].hidden}) == 1
    for size, found in enumerate(alone, 1):
        assert np.array_equal(found, alone[-1][:size])
        assert np.array_equal(found, logits(session, tokens[:size]))


def test_more_rows_than_the_buffer_has_get_a_larger_one(session: OnnxTarget) -> None:
    tokens = np.random.default_rng(1).integers(0, session.vocab_size, 70)
    few = logits(session, tokens[:5])
    many = logits(session, tokens)
    assert np.array_equal(few, many[:5])
    assert np.array_equal(few, logits(session, tokens[:5]))


def test_prompts_of_any_length_leave_the_bindings_of_decoding(session: OnnxTarget) -> None:
    tokens = np.random.default_rng(2).integers(0, session.vocab_size, 64)
    one_row = logits(session, tokens[:1])
    bound = session._passes.bound[1]
    for size in range(1, 65):
        session.prefill(tokens[:size], 0, ledger=Ledger())
    assert np.array_equal(logits(session, tokens[:1]), one_row)
    assert session._passes.bound[1] is bound
    assert list(session._passes.prefills) == [63, 64]


def test_a_prompt_leaves_the_bindings_of_whole_chunks_and_of_its_end(
    session: OnnxTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[BoundPass] = []
    release = BoundPass.release

    def spy(bound: BoundPass) -> None:
        released.append(bound)
        release(bound)

    monkeypatch.setattr(BoundPass, "release", spy)
    tokens = np.random.default_rng(3).integers(0, session.vocab_size, 8)
    for size in (8, 8, 3, 8, 8, 5):
        session.prefill(tokens[:size], 0, ledger=Ledger())
    assert list(session._passes.prefills) == [8, 5]
    assert len(released) == 1


def test_every_pass_names_its_graph_so_that_no_run_looks_for_one_in_vain(session: OnnxTarget) -> None:
    """ONNX Runtime's Python reads it in every run; where it is missing an error is raised and caught, 50 us each."""
    logits(session, np.arange(3))
    assert {one.options.get_run_config_entry("gpu_graph_id") for one in session._passes.bound.values()} == {"-1"}
