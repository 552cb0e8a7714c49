"""Recording a text: both models are fed the finished text, and at every head the draft's own continuation of it.

Nothing here is timed and no scheduler runs: what the models say does not depend on when they are asked.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import DraftSession, ExitGuesses, RowBlock, TargetSession
from mirrorsd.runtime.config import GenerationConfig
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.runtime.text.tokenizer import Message
from mirrorsd.runtime.tuning.recording import RecordedText, Recording

if TYPE_CHECKING:
    from mirrorsd.runtime.pipeline import MirrorPipeline

DEPTH = 12


def record_texts(
    pipe: "MirrorPipeline",
    prompts: Sequence[str | Sequence[Message]],
    config: GenerationConfig,
    *,
    depth: int = DEPTH,
    advance: Callable[[str], None] = lambda _: None,
) -> Recording:
    """Generate a text from every prompt, and record what draft and exits say all along it.

    Args:
        pipe: a loaded pipeline; an unpaced card is faster and records the same.
        prompts: plain texts, or conversations for the chat template.
        config: how to generate, the bundle's own defaults left out, as a recording keeps the temperature alone; text
            number `n` is sampled with the seed `config.seed + n`.
        depth: longest window that can be replayed.
        advance: told after every text.

    Raises:
        DeviceError: a device failed.
    """
    texts, config = [], config.resolve()
    for number, prompt in enumerate(prompts):
        seeded = config.with_overrides({"seed": (config.seed or 0) + number, "use_defaults": False})
        given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        result = pipe.generate(config=seeded, **given)
        tokens = np.asarray([*result.prompt_ids, *result.token_ids], dtype=np.int64)
        texts.append(record_text(pipe.engine, tokens, len(result.prompt_ids), seeded, depth))
        advance(f"{result.num_tokens} tokens")
    manifest = pipe.manifest
    sizes = sorted({bucket.rows for bucket in manifest.draft.buckets if bucket.tips > 1}) or [1]
    return Recording(
        texts=tuple(texts),
        temperature=(config.temperature or 1.0) if config.is_sampling else 0.0,
        layers=tuple(sorted(entry.layer for entry in manifest.target.exits)),
        num_layers=manifest.target.shape.num_layers,
        vocab_size=manifest.target.shape.vocab_size,
        round_sizes=tuple(sizes),
        max_tips=max(bucket.tips for bucket in manifest.draft.buckets),
    )


Guesses = tuple[NDArray[np.int64], NDArray[np.float32]]


def record_text(
    engine: Engine, tokens: NDArray[np.int64], num_prompt: int, config: GenerationConfig, depth: int
) -> RecordedText:
    """Ask both models about a finished text; `depth` is the longest window that a replay may want.

    `tokens [n]` are the prompt's `num_prompt` tokens and what `config` made the target say after them.

    Raises:
        DeviceError: a device failed.
    """
    first, chooser = num_prompt - 1, TokenChooser(config)
    draft = engine.draft_worker.run(engine.draft_model.new_session)
    engine.draft_worker.run(partial(draft.use_noise, chooser.noise_source()))
    target = engine.target_worker.run(engine.target_model.new_session)
    room = min(depth, target.context - len(tokens), draft.capacity - len(tokens))
    ids, logprobs = engine.draft_worker.run(partial(ask_draft, draft, tokens, first, room, chooser))
    positions = 1 + first + np.arange(len(ids))[:, None] + np.arange(room)[None, :]
    windows = chooser.guess(ids[:, :room, 0], logprobs[:, :room, 0], positions)
    exit_ids, exit_logprobs = engine.target_worker.run(partial(ask_exits, target, tokens, first, windows))
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
    )


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
            fed = chooser.guess(ids[heads, step, 0], logprobs[heads, step, 0], positions)
            slots = len(tokens) + np.arange(len(heads)) * depth
            blocks = [
                RowBlock([int(token)], int(position), first + 1 + int(head), range(slot, slot + step))
                for token, position, head, slot in zip(fed, positions, heads, slots.tolist(), strict=True)
            ]
            tips = session.run(blocks, range(len(heads)))
            ids[heads, step + 1], logprobs[heads, step + 1] = tips.ids, tips.logprobs
            session.keep_rows(range(len(heads)), (slots + step).tolist())
    return ids, logprobs


def ask_exits(session: TargetSession, tokens: NDArray[np.int64], first: int, windows: NDArray[np.int64]) -> Guesses:
    """What every exit says at the rows of every head's window: ids and log-probabilities `[E, P, D+1, K]`.

    Each head's pass writes over the rows of the window before it, as after a rejection.
    """
    if first:
        session.prefill(tokens[:first], 0, ledger=Ledger())
    passes: list[list[ExitGuesses]] = []
    for head, window in enumerate(windows):
        heard: list[ExitGuesses] = []
        rows = np.concatenate([tokens[first + head : first + head + 1], window])
        session.run(rows, first + head, with_logits=False, ledger=Ledger(), on_exit=heard.append)
        passes.append(heard)
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
