"""Fitting the root scores of a pair to recordings: logistic regression and conditional logit by Newton's method."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.machine.tuning.recording import RecordedText, Recording
from mirrorsd.runtime.ledger import AcceptanceRate
from mirrorsd.runtime.policy.roots import (
    DEFAULTS,
    Array,
    Candidates,
    RootScores,
    RootWeights,
    RowWeights,
    compete,
    global_roots,
    join,
    root_chances,
    row_features,
    token_chances,
    weights_name,
)
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.texts.config import GenerationConfig

_RIDGE = 3.0
_NEWTON_STEPS = 12


class Lesson(NamedTuple):
    """One head: its window, what was known about every row, what came true, and the log-odds of its acceptance rate."""

    window: NDArray[np.int64]
    candidates: Candidates
    num_accepted: int
    next_token: int
    rate_log_odds: float


class _Question(NamedTuple):
    """Candidates of one row, of which `answer` was the target's."""

    features: Array
    is_allowed: NDArray[np.bool_]
    answer: int


def lessons(recording: Recording, known: str, exit_index: int, gamma: int) -> Iterator[Lesson]:
    """Every head of every text as the planner would meet it."""
    for text in recording.texts:
        seed = text.seed
        chooser = TokenChooser(GenerationConfig(temperature=recording.temperature or None, seed=seed))
        rate = AcceptanceRate()
        for head in range(text.num_heads):
            num_accepted, next_token = text.outcome(head, gamma)
            window = text.windows[head, : min(gamma, text.num_heads - head - 1)]
            yield Lesson(
                window, _heard(text, chooser, known, exit_index, head, window), num_accepted, next_token, rate.log_odds
            )
            rate.observe(len(window), num_accepted)


def _heard(
    text: RecordedText, chooser: TokenChooser, known: str, exit_index: int, head: int, window: NDArray[np.int64]
) -> Candidates:
    num_rows = len(window) + 1
    positions = text.num_prompt + head + np.arange(num_rows)
    draft_ids, draft_logprobs = text.draft_ids[head, :num_rows, 0], text.draft_logprobs[head, :num_rows, 0]
    exit_ids, exit_logprobs = (
        text.exit_ids[exit_index, head, :num_rows],
        text.exit_logprobs[exit_index, head, :num_rows],
    )
    draft = compete(chooser, draft_ids, draft_logprobs, positions)
    exit_ = compete(chooser, exit_ids, exit_logprobs, positions)
    return join(None if known == "exit" else draft, None if known == "draft" else exit_)


def fit_scores(recordings: Sequence[Recording], gamma: int) -> RootScores:
    """Weights for all that the recordings show: the draft alone, every exit alone, both; greedy and sampled apart."""
    fitted = {}
    for recording in recordings:
        is_sampling = recording.temperature > 0
        fitted[weights_name("draft", 0, is_sampling=is_sampling)] = _fit(
            list(lessons(recording, "draft", 0, gamma)), "draft"
        )
        for index, layer in enumerate(recording.layers):
            for known in ("exit", "both"):
                met = list(lessons(recording, known, index, gamma))
                fitted[weights_name(known, layer, is_sampling=is_sampling)] = _fit(met, known)
    return RootScores(fitted=fitted)


def coverage(recording: Recording, scores: RootScores, known: str, gamma: int, budgets: Sequence[int]) -> list[float]:
    """Share of heads whose true root is among the best `budget`, for every budget."""
    hits = np.zeros(len(budgets))
    num_heads = 0
    for lesson in lessons(recording, known, len(recording.layers) - 1, gamma):
        weights = scores.weights(known, recording.layers[-1], is_sampling=recording.temperature > 0)
        found = root_chances(lesson.window, lesson.candidates, weights, lesson.rate_log_odds)
        roots = [(root.row, root.token) for root in global_roots(found, max(budgets))]
        truth = (lesson.num_accepted, lesson.next_token)
        place = roots.index(truth) if truth in roots else max(budgets)
        hits += np.asarray(budgets) > place
        num_heads += 1
    return [round(float(hit) / max(num_heads, 1), 4) for hit in hits]


def _fit(met: Sequence[Lesson], known: str) -> RootWeights:
    rows: list[Array] = []
    outcomes: list[NDArray[np.float64]] = []
    corrections: list[_Question] = []
    bonuses: list[_Question] = []
    for window, candidates, num_accepted, next_token, rate in met:
        tried = min(num_accepted + 1, len(window))
        rows.append(row_features(window, candidates, rate)[:tried])
        outcomes.append((np.arange(tried) < num_accepted).astype(np.float64))
        truth = np.append(window[:num_accepted], next_token)
        for row, token in enumerate(truth.tolist()):
            bonuses += _question(candidates, row, token, banned=-1)
        if num_accepted < len(window):
            corrections += _question(candidates, num_accepted, next_token, banned=int(window[num_accepted]))
    prior = DEFAULTS[known]
    return RootWeights(
        RowWeights(*_fit_logistic(np.concatenate(rows), np.concatenate(outcomes), prior.accept)),
        _fit_choice(corrections, prior.correction),
        _fit_choice(bonuses, prior.bonus),
    )


def _question(candidates: Candidates, row: int, token: int, *, banned: int) -> list[_Question]:
    """The row as a question, if the answer is among its candidates."""
    ids = candidates.ids[row]
    is_allowed = candidates.is_real[row] & (ids != banned)
    answer = np.flatnonzero((ids == token) & is_allowed)
    return [_Question(candidates.features[row], is_allowed, int(answer[0]))] if len(answer) else []


def _fit_logistic(rows: Array, outcomes: Array, prior: tuple[float, ...]) -> tuple[float, ...]:
    """Newton's method for `P(1) = sigmoid(rows @ w)`, drawn to the prior by a ridge."""
    start = np.asarray(prior)
    weights = start.copy()
    for _ in range(_NEWTON_STEPS):
        chance = 1.0 / (1.0 + np.exp(-np.clip(rows @ weights, -30, 30)))
        gradient = rows.T @ (outcomes - chance) - _RIDGE * (weights - start)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + _RIDGE * np.eye(len(start))
        weights = weights + _bounded(np.linalg.solve(curvature, gradient))
    return tuple(weights.tolist())


def _fit_choice(questions: Sequence[_Question], prior: tuple[float, ...]) -> tuple[float, ...]:
    """Newton's method for `P(k) = softmax(features @ w)[k]`, drawn to the prior by a ridge."""
    start = np.asarray(prior)
    if not questions:
        return prior
    features = np.stack([question.features for question in questions])
    allowed = np.stack([question.is_allowed for question in questions])
    chosen = features[np.arange(len(questions)), [question.answer for question in questions]]
    weights = start.copy()
    for _ in range(_NEWTON_STEPS):
        shares = token_chances(features, allowed, tuple(weights))
        mean = np.einsum("nm,nmf->nf", shares, features)
        gradient = (chosen - mean).sum(axis=0) - _RIDGE * (weights - start)
        spread = np.einsum("nm,nmf,nmg->fg", shares, features, features) - mean.T @ mean
        weights = weights + _bounded(np.linalg.solve(spread + _RIDGE * np.eye(len(start)), gradient))
    return tuple(weights.tolist())


def _bounded(step: Array) -> Array:
    """At most a length of one per step: far from the optimum the curvature promises too much."""
    length = float(np.linalg.norm(step))
    return step / max(length, 1.0)
