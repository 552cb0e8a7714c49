"""Every method writes what plain decoding writes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mirrorsd import GenerationConfig, MirrorPipeline

PROMPTS = ("The lighthouse keeper", "One two one two one two one", "x")


def check_methods(pipe: MirrorPipeline, methods: Sequence[str], temperature: float) -> None:
    """Compare texts of 32 tokens; of a session, each goes on with what the one before has left."""
    seed = 7 if temperature else None
    config = GenerationConfig(max_new_tokens=32, ignore_eos=True, temperature=temperature, seed=seed)
    for prompt in PROMPTS:
        (plain,) = texts_of(pipe, ("plain",), prompt, config)
        assert len(plain) == 32
        for method, text in zip(methods, texts_of(pipe, methods, prompt, config), strict=True):
            assert text == plain, (prompt, method)


def texts_of(pipe: MirrorPipeline, methods: Iterable[str], prompt: str, config: GenerationConfig) -> list[list[int]]:
    """The tokens of each method, in one session."""
    with pipe.session() as session:
        return [session.generate(prompt, config, method=method).token_ids for method in methods]


def check_conversations(pipe: MirrorPipeline, methods: Sequence[str], saved: Path) -> None:
    """Going on, changing an answer in its middle, the first prompt again, and another session that was given it all."""
    options: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.8, "seed": 4}
    with pipe.session() as session:
        first = session.generate(PROMPTS[0], method="mirror", **options)
        text = [*first.prompt_ids, *first.token_ids]
        num_saved = session.save_cache(saved)
        for ids in ([*text, 70, 71], [*text[:-9], 70], first.prompt_ids):
            for method in methods:
                found = session.generate(token_ids=ids, method=method, **options)
                with pipe.session() as other:
                    expected = other.generate(token_ids=ids, method="plain", **options)
                assert found.token_ids == expected.token_ids
        expected = session.generate(token_ids=text, method="plain", **options)
    with pipe.session() as session:
        assert session.load_cache(saved) == num_saved
        assert session.generate(token_ids=text, method="mirror", **options).token_ids == expected.token_ids


def check_several_answers(pipe: MirrorPipeline) -> None:
    """Each is that of its seed."""
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.9, "seed": 3}
    with pipe.session() as session:
        for result in session.generate_several(3, PROMPTS[0], **options):
            with pipe.session() as other:
                alone = other.generate(PROMPTS[0], **(options | {"seed": result.seed}), method="plain")
            assert alone.token_ids == result.token_ids
