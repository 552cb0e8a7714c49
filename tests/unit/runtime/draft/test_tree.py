"""The chain of known tokens, and the branches that grow from it."""

import numpy as np
import pytest

from mirrorsd.devices.draft_memory import TipGuesses
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.draft.tree import Branch, DraftChain, longest_common_prefix
from mirrorsd.runtime.policy.roots import Root
from mirrorsd.testing.fake import FakeDraft


@pytest.fixture
def draft() -> FakeDraft:
    return FakeDraft(lambda text: [text[-1] + 1], vocab_size=64, capacity=64)


@pytest.fixture
def chain(draft: FakeDraft) -> DraftChain:
    chain = DraftChain(draft)
    chain.restart(np.array([1, 2, 3, 4]))
    return chain


def test_the_common_beginning_of_a_new_text_stays_cached(chain: DraftChain, draft: FakeDraft) -> None:
    chain.feed(3)
    chain.restart(np.array([1, 2, 9, 8, 7]))
    assert (chain.num_fed, chain.num_known, chain.head) == (2, 5, 4)
    draft.texts_fed.clear()
    chain.feed(4)
    assert draft.texts_fed == [[1, 2, 9], [1, 2, 9, 8]]


def test_the_head_is_fed_again_even_if_the_whole_text_is_cached(chain: DraftChain) -> None:
    """What comes after it is asked of its row."""
    chain.feed(4)
    chain.restart(np.array([1, 2, 3, 4]))
    assert chain.num_fed == 3


def test_tokens_are_known_before_they_are_fed(chain: DraftChain) -> None:
    chain.feed(3)
    chain.append([5, 6])
    assert (chain.num_known, chain.num_fed, chain.token(5)) == (6, 3, 6)
    block = chain.block(5)
    assert (list(block.tokens), block.first_position, block.chain_visible) == ([4, 5], 3, 3)


def test_a_rollback_keeps_the_slots_before_it_and_no_other(chain: DraftChain, draft: FakeDraft) -> None:
    chain.append([5, 6])
    chain.feed(6)
    chain.cut(3)
    assert (chain.num_known, chain.num_fed) == (3, 3)
    chain.append([8, 9])
    draft.texts_fed.clear()
    chain.feed(5)
    assert draft.texts_fed == [[1, 2, 3, 8], [1, 2, 3, 8, 9]]


def test_a_rollback_past_what_is_fed_changes_no_slot(chain: DraftChain) -> None:
    chain.append([5, 6])
    chain.feed(2)
    chain.cut(5)
    assert (chain.num_known, chain.num_fed) == (5, 2)


def test_a_long_text_is_fed_in_chunks(chain: DraftChain, draft: FakeDraft) -> None:
    chain.restart(np.arange(41))
    chain.feed(40)
    assert (draft.num_passes, draft.prefill_rows, chain.num_fed) == (3, 16, 40)


def test_candidates_are_known_where_they_were_noted_until_the_text_changes(chain: DraftChain) -> None:
    chain.append([5, 6, 7])
    chain.note_candidates(3, [np.array([5]), np.array([6]), np.array([7])], [np.zeros(1, np.float32)] * 3)
    ids, logprobs = chain.candidates(3, 7)
    assert ids[:3].tolist() == [[5], [6], [7]]
    assert np.isfinite(logprobs[:, 0]).tolist() == [True, True, True, False]
    chain.cut(5)
    assert np.isfinite(chain.candidates(3, 7)[1][[0, 2, 3], 0]).tolist() == [True, False, False]
    chain.restart(np.array([1, 2, 3, 4]))
    assert not np.isfinite(chain.candidates(0, 7)[1]).any()


def test_after_a_failure_nothing_counts_as_cached(chain: DraftChain, draft: FakeDraft) -> None:
    chain.feed(4)
    chain.forget()
    chain.restart(np.array([1, 2, 3, 4]))
    draft.texts_fed.clear()
    chain.feed(2)
    assert draft.texts_fed == [[1], [1, 2]]


def test_an_answer_that_no_draft_gives_is_a_device_error() -> None:
    chain = DraftChain(FakeDraft(lambda text: [64], vocab_size=64))
    chain.restart(np.array([1, 2]))
    with pytest.raises(DeviceError, match=r"outside 0 \.\. 63"):
        chain.feed(1)


@pytest.mark.parametrize(
    ("left", "right", "size"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([4, 2], [1, 2], 0)]
)
def test_the_common_prefix_ends_at_the_first_difference(left: list[int], right: list[int], size: int) -> None:
    assert longest_common_prefix(np.array(left, dtype=np.int64), np.array(right, dtype=np.int64)) == size


def make_branch(token: int = 5) -> Branch:
    return Branch(Root(2, token, 0.5, "exit"), 10)


def absorb(branch: Branch, predicted: list[list[int]]) -> int:
    """A pass over all guesses; the share of token `t` is (`-t`, `-t - 1`)."""
    ids = np.array(predicted)[..., None]
    shares = [[(-token, -token - 1) for token in row] for row in predicted]
    return branch.absorb(predicted, shares, TipGuesses(ids, -ids.astype(np.float32)))


def test_a_new_branch_is_its_root_alone() -> None:
    branch = make_branch()
    assert (branch.guesses, branch.fed, branch.window, branch.num_window) == ([5], [], [], 0)


def test_a_pass_over_the_root_gives_a_window_of_guesses() -> None:
    branch = make_branch()
    assert absorb(branch, [[6, 7, 8]]) == 1
    assert (branch.fed, branch.window, branch.num_window) == ([5], [6, 7, 8], 3)


def test_confirmed_guesses_stay_and_the_last_one_s_streams_go_on() -> None:
    branch = make_branch()
    absorb(branch, [[6, 7, 8]])
    assert absorb(branch, [[7, 0, 0], [8, 0, 0], [9, 10, 11]]) == 3
    assert (branch.fed, branch.window) == ([5, 6, 7, 8], [6, 7, 8, 9, 10, 11])


def test_a_guess_that_the_draft_takes_back_goes_and_all_behind_it() -> None:
    """After 6 the draft now says 4, no longer 7: what it had said behind 7 is worth nothing."""
    branch = make_branch()
    absorb(branch, [[6, 7, 8]])
    assert absorb(branch, [[4, 2, 3], [8, 0, 0], [9, 10, 11]]) == 1
    assert (branch.fed, branch.window) == ([5, 6], [6, 4, 2, 3])


def test_each_token_of_the_window_has_its_candidates_and_its_share() -> None:
    branch = make_branch()
    absorb(branch, [[6, 7, 8]])
    absorb(branch, [[7, 0, 0], [4, 2, 3], [9, 10, 11]])
    assert branch.window == [6, 7, 4, 2, 3]
    assert [ids.tolist() for ids in branch.candidate_ids] == [[token] for token in branch.window]
    assert [logprobs.tolist() for logprobs in branch.candidate_logprobs] == [[-token] for token in branch.window]
    assert branch.shares == [(-token, -token - 1) for token in branch.window]


def test_the_scheduler_sees_as_much_as_it_can_use() -> None:
    branch = make_branch()
    absorb(branch, [[6, 7, 8]])
    absorb(branch, [[7, 0, 0], [4, 2, 3], [0, 0, 0]])
    seen = branch.published(4)
    assert (seen.tokens.tolist(), seen.source) == ([6, 7, 4, 2], "exit")
    assert seen.num_main == 3, "6, 7 and 4 come from the main row, 2 from a stream"
    assert len(seen.shares) == 4
