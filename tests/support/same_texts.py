"""Every method writes what plain decoding writes."""

from collections.abc import Iterable, Sequence

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
