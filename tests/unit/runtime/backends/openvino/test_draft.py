"""The noise that the draft's graph adds: rows by position, and the same noise as the target's choice."""

import numpy as np

from mirrorsd.graphs.contract import DraftShape
from mirrorsd.runtime.backends.openvino.draft import DraftNoise
from mirrorsd.runtime.config import GenerationConfig
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.runtime.sampling.noise import gumbel

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
    assert noise.tensor.data[:, 0].tolist() == [0, 9, 6, 7]


def test_a_request_without_noise_sees_none_of_the_last_one_s() -> None:
    noise = DraftNoise(SHAPE)
    noise.follow(noise_at)
    noise.rows_at(np.array([[1, 2]]))
    noise.follow(None)
    noise.rows_at(np.array([[1, 2]]))
    assert not noise.tensor.data.any()


def test_another_request_s_noise_is_written_anew_at_the_same_position() -> None:
    noise = DraftNoise(SHAPE)
    noise.follow(noise_at)
    noise.rows_at(np.array([[1, 2]]))
    noise.follow(lambda position, vocab_size: -noise_at(position, vocab_size))
    noise.rows_at(np.array([[1, 2]]))
    assert noise.tensor.data[1:3, 0].tolist() == [-1, -2]


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
    assert not chooser.draws_ahead
