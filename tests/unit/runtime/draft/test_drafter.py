"""Windows after the chain, branches beside it, and the moves between them. The fake draft checks each row's text."""

from typing import Any

import numpy as np
import pytest

from mirrorsd.devices.draft_memory import TipGuesses
from mirrorsd.runtime.draft.drafter import Drafter, Offer, cut_window, mix
from mirrorsd.runtime.draft.tree import NO_TOKENS, Branch, BranchWindow, RepeatedText
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.policy.roots import Root
from mirrorsd.runtime.policy.windows import RepeatChances, WindowOrder
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.testing.fake import FakeDraft
from mirrorsd.texts.config import GenerationConfig

ORDER = WindowOrder(limit=4, passes=4)


def make_drafter(text: list[int], *, streams: int = 3, **options: Any) -> tuple[Drafter, FakeDraft]:
    """A draft that counts up, and has read `text`."""
    draft = FakeDraft(
        lambda seen: [(seen[-1] + 1 + i) % 64 for i in range(1 + streams)],
        vocab_size=64,
        num_streams=streams,
        **options,
    )
    drafter = Drafter(draft)
    read(drafter, text)
    return drafter, draft


def read(drafter: Drafter, text: list[int]) -> None:
    drafter.prefill(np.array(text), TokenChooser(GenerationConfig()), Ledger())


def offer(drafter: Drafter, row: int, token: int, worth: float = 1.0) -> Offer:
    """A new branch after `row` tokens of the window that follows 3 4 5."""
    branch = drafter.branches[row, token] = Branch(Root(row, token, worth, "exit"), 2 + row + 1)
    return Offer(branch, [worth])


def grow(drafter: Drafter, *offers: Offer, max_rows: int = 32) -> list[Branch]:
    scratch = drafter.chain.num_known
    return drafter.grow(offers, scratch, 4, max_rows, max(offer.branch.start for offer in offers))


@pytest.mark.parametrize("streams", [0, 1, 3])
def test_a_fresh_window_continues_the_text(streams: int) -> None:
    drafter, _ = make_drafter([3, 4, 5], streams=streams)
    assert drafter.fresh(ORDER).tolist() == [6, 7, 8, 9]
    assert drafter.chain.num_known == 7


def test_a_fresh_window_has_as_many_passes_as_were_ordered() -> None:
    drafter, draft = make_drafter([3, 4, 5], streams=1)
    assert drafter.fresh(WindowOrder(limit=9, passes=2)).tolist() == [6, 7, 8, 9]
    assert draft.num_passes == 2


def test_a_window_ends_where_the_cache_does() -> None:
    drafter, _ = make_drafter([3, 4, 5], capacity=5)
    assert drafter.fresh(ORDER).tolist() == [6, 7]


def test_a_chain_is_fed_alone_once_and_no_more_than_one_round_takes() -> None:
    drafter, draft = make_drafter([3, 4, 5])
    assert drafter.lead(3)
    assert (drafter.chain.num_fed, draft.num_passes) == (3, 1)
    assert drafter.chain.candidates(0, 3)[0][:, 0].tolist() == [4, 5, 6]
    assert not drafter.lead(3), "nothing is left"
    drafter.adopt(2, 0, 6, np.arange(7, 7 + max(draft.round_sizes)))
    assert not drafter.lead(drafter.chain.num_known), "one more than a round has"
    assert drafter.fresh(ORDER).tolist()[0] == (7 + max(draft.round_sizes)) % 64


def test_what_was_verified_is_the_chain_and_the_rest_of_the_window_is_gone() -> None:
    drafter, draft = make_drafter([3, 4, 5])
    drafter.fresh(ORDER)
    drafter.adopt(2, 2, 1, NO_TOKENS)
    assert drafter.fresh(ORDER).tolist() == [2, 3, 4, 5]
    assert draft.texts_fed[-1] == [3, 4, 5, 6, 7, 1]


def test_a_branch_whose_root_came_true_is_not_drafted_again() -> None:
    """Its fed rows are moved to their positions: the next window is drafted without reading them anew."""
    drafter, draft = make_drafter([3, 4, 5])
    drafter.fresh(ORDER)
    grow(drafter, offer(drafter, 1, 40), offer(drafter, 2, 13))
    window, source = drafter.resolve(2, 2, 13, ORDER)
    assert (window.tolist(), source) == ([14, 15, 16, 17], "late")
    draft.texts_fed.clear()
    window, source = drafter.resolve(5, 4, 18, ORDER)
    assert (window.tolist(), source) == ([19, 20, 21, 22], "fresh")
    assert draft.texts_fed[0] == [3, 4, 5, 6, 7, 13, 14]
    assert draft.texts_fed[-1] == [3, 4, 5, 6, 7, 13, 14, 15, 16, 17, 18]


def test_branches_whose_root_did_not_come_true_are_no_help() -> None:
    drafter, draft = make_drafter([3, 4, 5])
    drafter.fresh(ORDER)
    grow(drafter, offer(drafter, 2, 13))
    window, source = drafter.resolve(2, 1, 13, ORDER)
    assert (window.tolist(), source) == ([14, 15, 16, 17], "fresh")
    assert draft.texts_fed[-1] == [3, 4, 5, 6, 13]
    assert drafter.branches == {}


def test_a_round_that_has_no_room_for_all_takes_the_worthiest() -> None:
    """The chain's two tokens before the roots, and one root."""
    drafter, _ = make_drafter([3, 4, 5])
    drafter.fresh(ORDER)
    grown = grow(drafter, offer(drafter, 2, 13, 0.2), offer(drafter, 2, 40, 0.5), max_rows=3)
    assert [branch.root.token for branch in grown] == [40]
    assert grown[0].window == [41, 42, 43, 44]


def test_no_branch_grows_where_the_cache_is_full() -> None:
    drafter, draft = make_drafter([3, 4, 5], capacity=7)
    drafter.fresh(ORDER)
    assert grow(drafter, offer(drafter, 2, 13)) == []
    assert drafter.grow([], 7, 4, 32, 7) == []
    assert draft.num_passes == 1


def test_free_slots_begin_after_the_chain_and_every_branch() -> None:
    drafter, _ = make_drafter([3, 4, 5])
    drafter.fresh(ORDER)
    assert drafter.first_scratch_slot() == 7
    grow(drafter, offer(drafter, 2, 13), offer(drafter, 2, 40))
    assert drafter.first_scratch_slot() == 9


def test_the_next_text_keeps_what_both_begin_with_unless_all_was_forgotten() -> None:
    drafter, draft = make_drafter([3, 4, 5])
    drafter.fresh(ORDER)
    for forgets, shortest in ((False, 3), (True, 1)):
        if forgets:
            drafter.forget()
        read(drafter, [3, 4, 20])
        draft.texts_fed.clear()
        assert drafter.fresh(ORDER).tolist() == [21, 22, 23, 24]
        assert min(map(len, draft.texts_fed)) == shortest


def test_a_long_prompt_is_read_before_the_first_round_and_a_short_one_with_it() -> None:
    assert make_drafter(list(range(33)))[1].num_passes == 2
    drafter, draft = make_drafter(list(range(32)))
    assert draft.num_passes == 0
    drafter.fresh(ORDER)
    assert draft.num_passes == 1


def test_no_more_of_a_window_is_taken_than_was_ordered() -> None:
    found = BranchWindow(np.array([6, 7, 8]), "exit", [(0.0, -1.0)] * 3, 1)
    assert cut_window(found, WindowOrder(limit=2, passes=1)).tolist() == [6, 7]


class UnsureDraft(FakeDraft):
    """Gives every guess this probability, and the rest to token 63."""

    certainty = 0.6

    def run(self, blocks: Any, tip_rows: Any) -> TipGuesses:
        ids = super().run(blocks, tip_rows).ids
        logprobs = np.broadcast_to(np.log([self.certainty, 1 - self.certainty]), (*ids.shape[:2], 2))
        return TipGuesses(np.concatenate((ids, np.full_like(ids, 63)), axis=2), logprobs.astype(np.float32))


LINE = [20, 21, 22, 23, 24, 25, 26, 40, 41, 42, 43, 50]


def repeating(
    text: list[int],
    certainty: float,
    *,
    with_repeats: bool = True,
    seed: int | None = None,
    chances: RepeatChances | None = None,
) -> Drafter:
    """A draft that counts up with this certainty, and has read a text that may repeat itself."""
    draft = UnsureDraft(
        lambda seen: [(seen[-1] + 1 + i) % 64 for i in range(4)], vocab_size=64, num_streams=3, num_candidates=2
    )
    draft.certainty = certainty
    drafter, sampling = Drafter(draft), {} if seed is None else {"temperature": 1.0, "seed": seed}
    repeats = RepeatedText(chances or RepeatChances(), text) if with_repeats else None
    drafter.prefill(np.array(text), TokenChooser(GenerationConfig(**sampling)), Ledger(), repeats)
    return drafter


def test_an_unsure_draft_says_what_the_text_has_said() -> None:
    """The text stands as it did before its 40; the draft would say 27."""
    text, order = [*LINE, *LINE[:7]], WindowOrder(limit=4, passes=2)
    assert repeating(text, 0.6).fresh(order).tolist() == [40, 41, 42, 43]
    assert repeating(text, 0.999).fresh(order).tolist() == [27, 28, 29, 30]
    assert repeating(text, 0.6, with_repeats=False).fresh(order).tolist() == [27, 28, 29, 30]


def test_streams_follow_what_the_text_has_said() -> None:
    """One pass: its row says 26, what comes after that was never counted up."""
    assert repeating([*LINE, *LINE[:6]], 0.6).fresh(WindowOrder(limit=4, passes=1)).tolist() == [26, 40, 41, 42]


def test_a_branch_goes_on_as_the_text_did() -> None:
    """Text and root stand as they did before 26: the row behind the root, and its streams know the rest."""
    drafter = repeating([*LINE, *LINE[:5]], 0.6)
    drafter.fresh(WindowOrder(limit=3, passes=1))
    branch = drafter.branches[0, 25] = Branch(Root(0, 25, 1.0, "early"), 17)
    drafter.grow([Offer(branch, [1.0])], drafter.chain.num_known, 6, 32, 17)
    assert branch.window == [26, 40, 41, 42]


def test_sampled_guesses_compete_with_their_noise_beside_what_the_text_has_said() -> None:
    """Over many seeds the repeated token is guessed about as often as the mixture says: 0.4 and its share of 63."""
    text = [*LINE, *LINE[:7]]
    guesses = [repeating(text, 0.6, seed=seed).fresh(WindowOrder(limit=1, passes=1))[0] for seed in range(300)]
    assert 0.3 < np.mean(np.array(guesses) == 40) < 0.6


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_list_of_candidates_is_judged_as_it_is_among_many(temperature: float) -> None:
    drafter, _ = make_drafter([1, 2])
    drafter.prefill(np.array([1, 2]), TokenChooser(GenerationConfig(temperature=temperature, seed=4)), Ledger())
    rng = np.random.default_rng(2)
    ids = np.stack([rng.choice(64, 8, replace=False) for _ in range(20)])
    logprobs = -np.sort(rng.exponential(3.0, (20, 8)).astype(np.float32))
    tokens, shares = drafter._choose(ids, logprobs, np.arange(20))
    for row in range(20):
        token, of_token = drafter._choose_one(ids[row], logprobs[row], row)
        assert token == tokens[row]
        np.testing.assert_allclose(of_token, shares[row], rtol=1e-6)


def test_a_candidate_gains_what_the_text_says_and_an_unlikelier_one_is_not_taken_in() -> None:
    ids, logprobs = np.array([4, 9]), np.log(np.array([0.6, 0.4], dtype=np.float32))
    mix(ids, logprobs, 9, 0.5)
    assert ids.tolist() == [9, 4]
    np.testing.assert_allclose(np.exp(logprobs), [0.7, 0.3], atol=1e-6)
    mix(ids, logprobs, 8, 0.1)
    assert ids.tolist() == [9, 4], "0.27 of the last is more than 0.1"
    np.testing.assert_allclose(np.exp(logprobs), [0.63, 0.27], atol=1e-6)


def test_who_was_right_decides_what_the_text_counts_beside_this_draft() -> None:
    """The draft says 27 where the text says 40: what is verified settles it, not what was guessed behind that."""
    weights = {}
    for verified in (40, 27):
        chances, text = RepeatChances(), [*LINE, *LINE[:7]]
        drafter = repeating(text, 0.6, chances=chances)
        drafter.fresh(WindowOrder(limit=4, passes=2))
        drafter.adopt(len(text) - 1, 0, verified, NO_TOKENS)
        weights[verified] = chances.share(1.0)
        drafter.adopt(len(text), 0, 41, NO_TOKENS)
        assert chances.share(1.0) == weights[verified], "nothing was guessed since"
    assert weights[27] < RepeatChances().share(1.0) < weights[40]


def test_what_stood_behind_a_wrong_guess_settles_nothing() -> None:
    """A stream says 40 after 11. The text knows a 7 behind that, but the draft's own row says 12 instead of 40."""
    ahead = {10: [11, 40, 41, 42], 11: [12, 13, 14, 15]}
    draft = UnsureDraft(
        lambda seen: ahead.get(seen[-1], [(seen[-1] + 1 + i) % 64 for i in range(4)]),
        vocab_size=64,
        num_streams=3,
        num_candidates=2,
    )
    drafter, chances, text = Drafter(draft), RepeatChances(), [11, 40, 41, 7, 30, 10]
    drafter.prefill(np.array(text), TokenChooser(GenerationConfig()), Ledger(), RepeatedText(chances, text))
    window = drafter.fresh(WindowOrder(limit=6, passes=2))
    assert window.tolist() == [11, 12, 13, 14, 15]
    drafter.adopt(len(text) - 1, len(window), 16, NO_TOKENS)
    assert chances.share(1.0) == RepeatChances().share(1.0)
