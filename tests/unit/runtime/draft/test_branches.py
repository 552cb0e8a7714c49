"""Branches grow by what the draft confirms; the table shows the scheduler each one as it stands."""

import numpy as np

from mirrorsd.runtime.backends.protocol import TipGuesses
from mirrorsd.runtime.draft.branches import Branch, BranchTable
from mirrorsd.runtime.policy.roots import Root


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


def test_the_table_shows_a_branch_as_it_was_published_last() -> None:
    table, branch = BranchTable(), make_branch()
    assert table.get(2, 5) is None
    absorb(branch, [[6, 7, 8]])
    table.publish(branch, 8)
    absorb(branch, [[4, 2, 3], [0, 0, 0], [0, 0, 0]])
    assert table.get(2, 5).tokens.tolist() == [6, 7, 8]
    table.publish(branch, 8)
    assert table.get(2, 5).tokens.tolist() == [6, 4, 2, 3]
    assert table.get(1, 5) is None


def test_a_closed_table_can_still_be_read() -> None:
    table, branch = BranchTable(), make_branch()
    absorb(branch, [[6, 7, 8]])
    table.publish(branch, 8)
    assert not table.is_closed
    table.close()
    assert table.is_closed
    assert table.get(2, 5).tokens.tolist() == [6, 7, 8]
