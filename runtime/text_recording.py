"""Recording whole conversations of a pipeline: generate each text, then ask both models about it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mirrorsd.runtime.config import GenerationConfig
from mirrorsd.runtime.recorder import record_text
from mirrorsd.runtime.recording import Recording
from mirrorsd.runtime.text.tokenizer import Message

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
