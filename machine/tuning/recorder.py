"""Recording a text: both models are fed the finished text, and at every head the draft's own continuation of it.

Drafting heads beside the target read its passes along the text, and guess behind every token.

Nothing here is timed and no scheduler runs: what the models say does not depend on when they are asked.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.graphs.errors import ContextLengthError
from mirrorsd.machine.tuning.recording import RecordedText, Recording
from mirrorsd.runtime.backends.protocol import DraftSession, TargetSession
from mirrorsd.runtime.decoding.head import noise_behind
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.ledger import ExitGuesses, Ledger
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.messages import Message

if TYPE_CHECKING:
    from mirrorsd.runtime.pipeline import MirrorPipeline

DEPTH = 12


def record_texts(
    pipe: "MirrorPipeline",
    prompts: Sequence[str | Sequence[Message]],
    config: GenerationConfig,
    *,
    depth: int = DEPTH,
    heads: Collection[str] = (),
    advance: Callable[[str], None] = lambda _: None,
) -> Recording:
    """Generate a text from every prompt, and record what draft, exits and heads say all along it.

    Args:
        pipe: a loaded pipeline; an unpaced card is faster and records the same.
        prompts: plain texts, or conversations for the chat template.
        config: how to generate, the bundle's own defaults left out, as a recording keeps the temperature alone; text
            number `n` is sampled with the seed `config.seed + n`.
        depth: longest window that can be replayed.
        heads: kinds of heads of the bundle that are recorded too.
        advance: told after every text.

    Raises:
        ContextLengthError: a prompt leaves no room for a token and a window.
        DeviceError: a device failed.
    """
    texts, config = [], config.resolve()
    for number, prompt in enumerate(prompts):
        seeded = config.with_overrides({"seed": (config.seed or 0) + number, "use_defaults": False})
        given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        result = pipe.generate(config=seeded, **given)
        whole = [*result.prompt_ids, *result.token_ids]
        most = max(pipe.manifest.target.context - 1, len(result.prompt_ids) + 1)  # a window must fit behind it
        tokens = np.asarray(whole[:most], dtype=np.int64)
        text = record_text(pipe.engine, tokens, len(result.prompt_ids), seeded, depth, heads=heads)
        texts.append(replace(text, ends=result.stop_reason == "eos" and len(whole) <= most))
        advance(f"{result.num_tokens} tokens")
    return recording_of(pipe, texts, (config.temperature or 1.0) if config.is_sampling else 0.0)


def recording_of(pipe: "MirrorPipeline", texts: Sequence[RecordedText], temperature: float) -> Recording:
    """Put recorded texts of a pipeline together; all have the same heads."""
    manifest = pipe.manifest
    sizes = sorted({bucket.rows for bucket in manifest.draft.buckets if bucket.tips > 1}) or [1]
    return Recording(
        texts=tuple(texts),
        temperature=temperature,
        layers=tuple(sorted(entry.layer for entry in manifest.target.exits)),
        num_layers=manifest.target.shape.num_layers,
        vocab_size=manifest.target.shape.vocab_size,
        round_sizes=tuple(sizes),
        max_tips=max(bucket.tips for bucket in manifest.draft.buckets),
        heads=tuple(head for head in manifest.heads if head.kind in texts[0].head_ids),
    )


Guesses = tuple[NDArray[np.int64], NDArray[np.float32]]
_PASS_S = 10.0
"""Longest time of a pass: all those of a text are one job for a device."""


def record_text(
    engine: Engine,
    tokens: NDArray[np.int64],
    num_prompt: int,
    config: GenerationConfig,
    depth: int,
    *,
    heads: Collection[str] = (),
) -> RecordedText:
    """Ask both models about a finished text, and `heads`; `depth` is the longest window that a replay may want.

    `tokens [n]` are the prompt's `num_prompt` tokens and what `config` made the target say after them.

    Raises:
        ContextLengthError: the text fills the context.
        DeviceError: a device failed.
    """
    first, chooser = num_prompt - 1, TokenChooser(config)
    draft = engine.draft_worker.run(engine.draft_model.new_session)
    engine.draft_worker.run(partial(draft.use_noise, chooser.noise_source()))
    target = engine.target_worker.run(engine.target_model.new_session)
    room = min(depth, target.context - len(tokens), draft.capacity - len(tokens))
    if room < 1:
        raise ContextLengthError(
            f"A text of {len(tokens)} tokens fills the context, which leaves no room for windows to record. Ask for "
            "fewer new tokens, or export the bundle with more --context."
        )
    longest = _PASS_S * len(tokens)
    ids, logprobs = engine.draft_worker.run(partial(ask_draft, draft, tokens, first, room, chooser), deadline_s=longest)
    positions = 1 + first + np.arange(len(ids))[:, None] + np.arange(room)[None, :]
    windows = likeliest(chooser, ids[:, :room, 0], logprobs[:, :room, 0], positions)
    asked = {kind: AskedHead(target, kind, tokens, first, chooser) for kind in heads}
    ask = partial(ask_target, target, tokens, first, windows, tuple(asked.values()))
    exit_ids, exit_logprobs = engine.target_worker.run(ask, deadline_s=longest)
    engine.draft_worker.run(draft.close)
    engine.target_worker.run(target.close)
    return RecordedText(
        tokens=tokens,
        num_prompt=num_prompt,
        seed=config.seed or 0,
        windows=windows,
        draft_ids=ids,
        draft_logprobs=logprobs,
        exit_ids=exit_ids,
        exit_logprobs=exit_logprobs,
        head_ids={kind: head.ids for kind, head in asked.items()},
        head_logprobs={kind: head.logprobs for kind, head in asked.items()},
    )


def likeliest(
    chooser: TokenChooser, ids: NDArray[np.int64], logprobs: NDArray[np.floating], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The candidate of each list that is the likeliest to be chosen: `[..., m]` -> `[...]`."""
    if chooser.keeps_order:
        return ids[..., 0]
    best = np.argmax(chooser.rank(ids, logprobs, positions), axis=-1)
    return np.take_along_axis(ids, best[..., None], axis=-1)[..., 0]


def ask_draft(
    session: DraftSession, tokens: NDArray[np.int64], first: int, depth: int, chooser: TokenChooser
) -> Guesses:
    """What the draft says after every head and along its own continuation: ids and logprobs `[P, D+1, 1+s, m]`.

    The text is fed once; then the continuations of many heads grow side by side, a token per pass, each in cache slots
    of its own after the text.
    """
    num_heads = len(tokens) - 1 - first
    after_heads = _feed_text(session, tokens, first)
    ids = np.zeros((num_heads, depth + 1, *after_heads[0].shape[1:]), dtype=np.int64)
    logprobs = np.zeros(ids.shape, dtype=np.float32)
    ids[:, 0], logprobs[:, 0] = after_heads
    widest = min(session.max_tips, max(session.round_sizes), (session.capacity - len(tokens)) // max(depth, 1))
    for start in range(0, num_heads, widest):
        heads = np.arange(start, min(start + widest, num_heads))
        for step in range(depth):
            positions = first + 1 + heads + step
            fed = likeliest(chooser, ids[heads, step, 0], logprobs[heads, step, 0], positions)
            slots = len(tokens) + np.arange(len(heads)) * depth
            blocks = [
                RowBlock([int(token)], int(position), first + 1 + int(head), range(slot, slot + step))
                for token, position, head, slot in zip(fed, positions, heads, slots.tolist(), strict=True)
            ]
            tips = session.run(blocks, range(len(heads)))
            ids[heads, step + 1], logprobs[heads, step + 1] = tips.ids, tips.logprobs
            session.keep_rows(range(len(heads)), (slots + step).tolist())
    return ids, logprobs


class AskedHead:
    """What a head guesses along a text: `ids` and `logprobs` `[P, K, m]`, -1 where it had no row to read."""

    def __init__(
        self, session: TargetSession, kind: str, tokens: NDArray[np.int64], first: int, chooser: TokenChooser
    ) -> None:
        shape = session.heads[kind].shape
        self.ids = np.full((len(tokens) - 1 - first, shape.length, shape.num_candidates), -1, dtype=np.int64)
        self.logprobs = np.zeros(self.ids.shape, dtype=np.float32)
        self._session, self._kind, self._tokens, self._first, self._chooser = session, kind, tokens, first, chooser

    def read(self, start: int, stop: int) -> None:
        """Rows `start .. stop - 1` have passed through the target; nothing is guessed behind the text's last token."""
        head = stop - self._first
        if head < len(self.ids):
            noise = noise_behind(self._chooser, stop + 1, (self.ids.shape[1], self._session.vocab_size))
            following = self._tokens[start + 1 : stop + 1]
            found = self._session.guess(self._kind, following, start, noise=noise, ledger=Ledger())
            self.ids[head], self.logprobs[head] = found.ids, found.logprobs


def ask_target(
    session: TargetSession,
    tokens: NDArray[np.int64],
    first: int,
    windows: NDArray[np.int64],
    heads: Sequence[AskedHead] = (),
) -> Guesses:
    """What every exit says at the rows of every head token's window: ids and log-probabilities `[E, P, D+1, K]`.

    Each pass writes over the rows of the window before it, as after a rejection. `heads` read the text's own rows.
    """
    if first:
        session.prefill(tokens[:first], 0, ledger=Ledger())
        for head in heads:
            head.read(0, first)
    passes: list[list[ExitGuesses]] = []
    for place, window in enumerate(windows, start=first):
        heard: list[ExitGuesses] = []
        rows = np.concatenate([tokens[place : place + 1], window])
        session.run(rows, place, with_logits=False, ledger=Ledger(), on_exit=heard.append)
        passes.append(heard)
        for head in heads:
            head.read(place, place + 1)
    ids = np.stack([np.stack([guesses.ids for guesses in heard]) for heard in passes], axis=1)
    return ids, np.stack([np.stack([guesses.logprobs for guesses in heard]) for heard in passes], axis=1)


def _feed_text(session: DraftSession, tokens: NDArray[np.int64], first: int) -> Guesses:
    """Cache the text; what the draft says after each position from `first` to the last but one, `[P, 1+s, m]`."""
    session.prepare(session.capacity)
    start, found = 0, []
    stop_text = len(tokens) - 1
    while start < stop_text:
        is_prompt = start < first
        size = session.prefill_rows if is_prompt else min(session.max_tips, max(session.round_sizes))
        stop = min(start + size, first if is_prompt else stop_text)
        tip_rows = [stop - start - 1] if is_prompt else range(stop - start)
        tips = session.run([RowBlock(tokens[start:stop].tolist(), start, start)], tip_rows)
        if not is_prompt:
            found.append((tips.ids.copy(), tips.logprobs.copy()))
        session.keep_rows(range(stop - start), range(start, stop))
        start = stop
    return np.concatenate([ids for ids, _ in found]), np.concatenate([logprobs for _, logprobs in found])
