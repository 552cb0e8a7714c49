"""Who answers: a method of our own, on a session that forgets. Other runtimes are in `peers`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from mirrorsd.cli.bench.answers import Answer
from mirrorsd.texts.speculation import check_head

if TYPE_CHECKING:
    from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
    from mirrorsd.graphs.names import Method
    from mirrorsd.runtime.decoding.request import StepRecord

_UNWANTED = ("none", "forced")
"""Steps that wanted no window: the text's last one, and those whose form leaves no choice."""


class Entrant(Protocol):
    """One way to decode.

    Attributes:
        name: of its file and its rows.
        is_own: whether its texts must be those of the other methods.
    """

    name: str
    is_own: bool

    def answer(self, ids: Sequence[int], *, most: int, seed: int | None) -> Answer:
        """Decode after the prompt `ids`, up to `most` new tokens or the end of the text; nothing of it is cached."""


class OwnMethod(Entrant):
    """A method of the pipeline, on a session of its own."""

    is_own = True

    def __init__(self, pipe: "MirrorPipeline", method: "Method", temperature: float, *, ignore_eos: bool) -> None:
        self.name: str = method
        self._method, self._temperature, self._ignore_eos = method, temperature, ignore_eos
        self._session = pipe.session()
        check_head(method, pipe.manifest, self._session.heads)

    def config(self, most: int, seed: int | None) -> "GenerationConfig":
        """How a text is written.

        Raises:
            ConfigError: a setting is out of its range.
        """
        from mirrorsd import GenerationConfig

        return GenerationConfig(
            max_new_tokens=most,
            temperature=self._temperature,
            seed=seed,
            ignore_eos=self._ignore_eos,
            use_defaults=False,
            method=self._method,
        )

    def answer(self, ids: Sequence[int], *, most: int, seed: int | None) -> Answer:
        self._session.forget()
        return as_answer(self._session.generate(token_ids=list(ids), config=self.config(most, seed)))


def as_answer(result: "GenerationResult") -> Answer:
    """What the benchmark keeps of a result."""
    stats = result.stats
    began = result.steps[0].ended - stats.time_to_first_token_ms / 1e3
    found = answer_of(result.steps, list(result.token_ids), began=began, prefilled=began + stats.prefill_ms / 1e3)
    return replace(found, text=result.text, finish_reason=result.stop_reason, write_trace=result.write_trace)


def answer_of(steps: Sequence["StepRecord"], token_ids: list[int], *, began: float, prefilled: float) -> Answer:
    """What steps say of the tokens that they brought; `began` and `prefilled` are seconds of their clock."""
    ends = [step.ended - began for step in steps]
    return Answer(
        text="",
        token_ids=token_ids,
        wall_s=ends[-1],
        finish_reason="",
        num_steps=len(steps),
        accept_lengths=step_lengths([step.num_accepted for step in steps], len(token_ids)),
        window_lengths=[step.num_window for step in steps],
        step_ends_s=ends,
        prefill_s=prefilled - began,
        ttft_s=ends[0],
        sources=Counter(step.next_source for step in steps if step.next_source not in _UNWANTED),
    )


def step_lengths(accepted: Sequence[int], num_tokens: int) -> list[int]:
    """Tokens that each step brought: what it accepted and the target's own next one.

    A text may end within the last window: what the last step brought is what is left.

    >>> step_lengths([2, 0, 3], 8), step_lengths([2, 0, 3], 7)
    ([3, 1, 4], [3, 1, 3])
    """
    lengths = [count + 1 for count in accepted[:-1]]
    return [*lengths, num_tokens - sum(lengths)] if accepted else []
