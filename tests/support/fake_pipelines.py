"""Pipelines over fake devices: the text depends on what the caches hold, row by row; a draft that is often right."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mirrorsd import MirrorPipeline
from mirrorsd.device_maps import load_device_map
from mirrorsd.devices.layouts import choose_layout
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.runtime.engine import Engine
from mirrorsd.testing.fake import FakeDraft, FakeModel, FakeTarget
from mirrorsd.texts.config import SpeculationConfig, Speculations
from mirrorsd.texts.tokenizer import BundleTokenizer

VOCAB = 300


def logits_after(text: list[int]) -> np.ndarray:
    """A fixed pseudo-random model of 300 tokens."""
    return np.random.default_rng([len(text), *text[-3:]]).normal(size=VOCAB)


def guesses_after(text: list[int]) -> list[int]:
    """Three guesses, of which one in five is wrong."""
    text = list(text)
    for _ in range(3):
        text.append(int(logits_after(text).argmax()) if len(text) % 5 else 7)
    return text[-3:]


def target_of(kind: type[FakeTarget] = FakeTarget, seconds: float = 0.0) -> FakeTarget:
    """A target whose passes take at least so long."""
    return kind(logits_after, vocab_size=VOCAB, context=512, suffix_seconds=seconds)


def make_pipeline(
    bundle: Path, new_target: Callable[[], FakeTarget] = target_of, *, is_lent: bool = False, **speculation: object
) -> MirrorPipeline:
    """A pipeline with the tokenizer and manifest of a bundle."""
    engine = Engine(
        lambda: FakeModel(new_target),
        lambda: FakeModel(lambda: FakeDraft(guesses_after, vocab_size=VOCAB, num_streams=2, capacity=512)),
        is_target_lent=is_lent,
    )
    ways = SpeculationConfig(**{"prefill_rows": 16, **speculation})  # type: ignore[arg-type]
    layout = choose_layout(load_device_map("cpu"), None, None)
    return MirrorPipeline(engine, BundleTokenizer(bundle), read_bundle(bundle), layout, Speculations(ways, ways))
