"""A conversation that begins as another one did, with a long system message: seconds to its first token.

    python bench/claims/serving/same_beginning.py smollm2.mirror --beginning 1000 --output same_beginning.json

Prompts are the same first `--beginning` tokens, and a question each. One of two seats has read the beginning. The other
one is asked every prompt twice: as seats do it, and reading everything anew. Both must say the same.

Then `--users` ask at once, of seats and of sessions, which share nothing: seconds until the last of them has its first
token.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from statistics import median
from time import perf_counter

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.bench import runs

_LEAST_ROOM = 64
"""Tokens of the context that are left for a question and its answer."""


def main() -> None:
    """Measure, compare, print and write the report."""
    parser = runs.parser(__doc__, count=8, tokens=8)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--beginning", type=int, default=1000, help="tokens that all prompts begin with")
    parser.add_argument("--users", type=int, default=4, help="how many ask at once")
    parser.add_argument("--rounds", type=int, default=3, help="times that they do")
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    config = runs.text_config(options).with_overrides({"method": options.method})
    report = runs.header(options.bundle, device_map=options.device_map, beginning=options.beginning)
    seconds: dict[str, list[float]] = {"copied": [], "anew": []}
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe:
        questions = [pipe.encode(messages=prompt) for prompt in prompts]
        beginning = list(islice(chain.from_iterable(questions * options.beginning), options.beginning))
        room = pipe.manifest.target.context - options.beginning - _LEAST_ROOM
        seats = pipe.seats(2)
        with seats.take(beginning) as session:
            session.generate(token_ids=beginning, config=config)
        for question in questions:
            ids = [*beginning, *question[:room]]
            found = set[tuple[int, ...]]()
            for way in seconds:
                with seats.take(beginning):
                    started = perf_counter()
                    with seats.take(ids) as other:
                        if way == "anew":
                            other.forget()
                        taken = perf_counter() - started
                        result = other.generate(token_ids=ids, config=config)
                        other.forget()
                seconds[way].append(taken + result.stats.time_to_first_token_ms / 1e3)
                found.add(tuple(result.token_ids))
            if len(found) > 1:
                raise SystemExit("what was copied changed a text")
        seats.close()
        asked = [[*beginning, *question[:room]] for question in questions[: options.users]]
        together: dict[str, list[float]] = {"waiting": [], "anew": []}
        texts = set[tuple[tuple[int, ...], ...]]()
        for _ in range(options.rounds):
            for way, times in together.items():
                took, results = at_once(pipe, asked, config, shares=way == "waiting")
                times.append(took)
                texts.add(tuple(tuple(result.token_ids) for result in results))
        if len(texts) > 1:
            raise SystemExit("who asked at once got another text")
    report["users"] = options.users
    report["seconds_at_once"] = {way: round(median(times), 3) for way, times in together.items()}
    print("at once:", report["seconds_at_once"])
    report["seconds_to_first_token"] = {way: round(median(times), 3) for way, times in seconds.items()}
    report["times_faster"] = round(
        median(anew / copied for anew, copied in zip(seconds["anew"], seconds["copied"], strict=True)), 2
    )
    print(report["seconds_to_first_token"], "times faster:", report["times_faster"])
    report["ends"] = runs.ends(options)
    runs.finish(report, options.output)


def at_once(
    pipe: MirrorPipeline, prompts: Sequence[list[int]], config: GenerationConfig, *, shares: bool
) -> tuple[float, list[GenerationResult]]:
    """Seconds until all of them, asked on threads at once, have begun to answer; and the answers."""
    with ExitStack() as stack, ThreadPoolExecutor(len(prompts)) as threads:
        seats = pipe.seats(len(prompts))
        stack.callback(seats.close)
        alone = [] if shares else [stack.enter_context(pipe.session()) for _ in prompts]
        started = perf_counter()

        def answer(number: int) -> tuple[float, GenerationResult]:
            with ExitStack() as place:
                session = place.enter_context(seats.take(prompts[number])) if shares else alone[number]
                first, *others = session.stream(token_ids=prompts[number], config=config)
                took = perf_counter() - started
                result = (others[-1] if others else first).result
                assert result is not None
                return took, result

        found = list(threads.map(answer, range(len(prompts))))
    return max(took for took, _ in found), [result for _, result in found]


if __name__ == "__main__":
    main()
