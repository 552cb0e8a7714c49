"""The noise that the draft's graph adds: rows by position, and the same noise as the target's choice."""

from pathlib import Path

import numpy as np

from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.devices.slot_draft import DraftInputs, DraftNoise
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.manifest import TokenTable
from mirrorsd.graphs.token_rows import TokenRows
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.runtime.sampling.noise import gumbel
from mirrorsd.texts.config import GenerationConfig

SHAPE = DraftShape(
    num_layers=1, vocab_size=6, num_kv_heads=1, head_dim=4, num_streams=1, num_candidates=2, num_noise_rows=4
)


def noise_at(position: int, vocab_size: int) -> np.ndarray:
    return np.full(vocab_size, float(position))


def test_positions_take_the_rows_in_turn_and_are_written_once() -> None:
    asked: list[int] = []

    def source(position: int, vocab_size: int) -> np.ndarray:
        asked.append(position)
        return noise_at(position, vocab_size)

    noise = DraftNoise(SHAPE)
    noise.follow(source)
    assert noise.rows_at(np.array([[5, 6], [6, 7]])).tolist() == [[1, 2], [2, 3]]
    assert noise.rows_at(np.array([[7, 9]])).tolist() == [[3, 1]]
    assert asked == [5, 6, 7, 9]
    assert noise.rows[:, 0].tolist() == [0, 9, 6, 7]


def test_rows_that_pad_a_pass_hold_numbers_whatever_was_in_the_device_s_memory(tmp_path: Path) -> None:
    """A request's own tensors are not cleared; a score that is no number would pass any mask."""
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    (tmp_path / "weights.bin").write_bytes(table.tobytes())
    entry = TokenTable(file="weights.bin", num_rows=5, width=4, dtype="float32", offset=0)
    ids, rows = np.zeros((1, 3), np.int64), np.full((1, 3, 4), np.nan, np.float32)
    mask, tips = np.zeros((1, 1, 3, 9), np.float32), np.zeros(1, np.int64)
    inputs = DraftInputs(ids, ids.copy(), mask, tips, rows, TokenRows(tmp_path, entry))
    inputs.fill([], [])
    assert not rows.any()
    inputs.fill([RowBlock([4, 2], 0, 0)], [1])
    np.testing.assert_array_equal(rows[0], [*table[[4, 2]], np.zeros(4)])


def test_a_request_without_noise_sees_none_of_the_last_one_s() -> None:
    noise = DraftNoise(SHAPE)
    noise.follow(noise_at)
    noise.rows_at(np.array([[1, 2]]))
    noise.follow(None)
    noise.rows_at(np.array([[1, 2]]))
    assert not noise.rows.any()


def test_another_request_s_noise_is_written_anew_at_the_same_position() -> None:
    noise = DraftNoise(SHAPE)
    noise.follow(noise_at)
    noise.rows_at(np.array([[1, 2]]))
    noise.follow(lambda position, vocab_size: -noise_at(position, vocab_size))
    noise.rows_at(np.array([[1, 2]]))
    assert noise.rows[1:3, 0].tolist() == [-1, -2]


def test_the_source_is_the_noise_of_the_target_s_choice_times_the_temperature() -> None:
    source = TokenChooser(GenerationConfig(temperature=0.5, seed=3)).noise_source()
    assert source is not None
    assert np.allclose(source(7, 6), 0.5 * gumbel(3, np.array([7]), np.arange(6)))


def test_greedy_texts_have_no_source_and_filtered_ones_that_of_their_seed() -> None:
    assert TokenChooser(GenerationConfig()).noise_source() is None
    filtered = TokenChooser(GenerationConfig(temperature=1.0, seed=1, top_p=0.9)).noise_source()
    assert filtered is not None
    assert np.allclose(filtered(7, 6), gumbel(1, np.array([7]), np.arange(6)))


def test_top_k_alone_wants_the_likeliest_tokens_named() -> None:
    chooser = TokenChooser(GenerationConfig(temperature=1.0, seed=1, top_k=40))
    chooser.is_heard_by_draft = True
    assert chooser.noise_source() is None
    assert not chooser.draws_ahead(50_000)
