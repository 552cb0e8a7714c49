"""A conversation that begins as another one did, with a long system message: seconds to its first token.

    python bench/claims/serving/same_beginning.py smollm2.mirror --beginning 1000 --output same_beginning.json

Prompts are the same first `--beginning` tokens, and a question each. One of two seats has read the beginning. The other
one is asked every prompt twice: as seats do it, and reading everything anew. Both must say the same.
"""

from itertools import chain, islice
from pathlib import Path
from statistics import median
from time import perf_counter

from mirrorsd import MirrorPipeline
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
    report["seconds_to_first_token"] = {way: round(median(times), 3) for way, times in seconds.items()}
    report["times_faster"] = round(
        median(anew / copied for anew, copied in zip(seconds["anew"], seconds["copied"], strict=True)), 2
    )
    print(report["seconds_to_first_token"], "times faster:", report["times_faster"])
    report["ends"] = runs.ends(options)
    runs.finish(report, options.output)


if __name__ == "__main__":
    main()
