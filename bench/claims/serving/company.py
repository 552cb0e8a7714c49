"""Several users of one target: tokens per second of 1, 4 and 8 of them, and whether every text is the one alone.

    python bench/claims/serving/company.py smollm2.mirror --method plain --output company.json
    python bench/claims/serving/company.py smollm2.mirror --rounds 0 --texts 1000
    python bench/claims/serving/company.py smollm2.mirror --rounds 0 --arriving 1500 --tokens 400 --with _MEMORY=0.8

Users take the prompts from one queue, each with a session of its own. Numbers of users take turns, round by round; a
gain is the median of the rounds' ratios to one user. `--texts` asks that many texts of all methods in company of
eight: greedy and sampled, with penalties, log-probabilities and forms. Each is compared with the same text alone.
`--arriving` has a prompt of so many tokens come while seven texts are decoded, and says how long these stood still: the
99th percentile of the times between two of their chunks, in medians of the same without the prompt. `--with` measures
all of this once more, by turns, with a number of `runtime/devices/company.py` or `pass_times.py` at another value.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.runtime.devices import company, pass_times
from mirrorsd.runtime.session import MirrorSession

_OWNERS = (company, pass_times)
_STILL = ("step_ms", "p99_before", "p99_beside", "read_s")
_NUM_IDS = 256
"""Of a made-up prompt; every vocabulary has so many."""
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "logprobs": True},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"regex": "([A-Z][a-z]{1,9} ){3,12}"},
)
"""What texts are asked for, besides the method."""


class Asked(NamedTuple):
    """A prompt and how it is to be answered."""

    prompt: runs.Messages
    config: GenerationConfig


def main() -> None:
    """Measure, compare, print and write the report."""
    parser = runs.parser(__doc__, count=16, tokens=64)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--users", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=0, help="how many texts to compare with those alone")
    parser.add_argument("--arriving", type=int, default=0, help="tokens of a prompt that comes beside seven texts")
    parser.add_argument("--arrivals", type=int, default=3, help="of such a prompt")
    parser.add_argument("--with", dest="numbers", action="append", default=[], type=runs.changed, metavar="NAME=VALUE")
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    users = [int(number) for number in options.users.split(",")]
    config = runs.text_config(options).with_overrides({"method": options.method})
    report = runs.header(options.bundle, device_map=options.device_map, texts=len(prompts), tokens=options.tokens)
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe:
        sessions = [pipe.session() for _ in range(max(*users, 8))]
        open_company(pipe)
        numbers = [None, *options.numbers]
        rows = measure(sessions, [Asked(prompt, config) for prompt in prompts], users, options.rounds, numbers)
        runs.print_rows(rows, ("users", "with", "tokens_per_second", "gain"))
        asked = list(islice(mixed(prompts, pipe.methods, options.tokens), options.texts))
        num_different = count_different(sessions[:8], asked)
        if options.arriving:
            found: dict[str, list[dict[str, float]]] = {}
            for number in numbers * options.arrivals:
                with runs.with_changed(number, _OWNERS):
                    still = standing_still(sessions, prompts, config, options.arriving)
                found.setdefault(str(number or ""), []).append(still)
            report["standing_still"] = [
                {"with": name} | {key: median(still[key] for still in stills) for key in _STILL}
                for name, stills in found.items()
            ]
            runs.print_rows(report["standing_still"], ("with", *_STILL))
    report |= {"method": options.method, "rows": rows, "compared": len(asked), "different": num_different}
    report["ends"] = runs.ends(options)
    print(f"{num_different} of {len(asked)} texts differ from those alone")
    runs.finish(report, options.output)
    if num_different:
        raise SystemExit(1)


def open_company(pipe: MirrorPipeline) -> None:
    """Have joint passes ready, as they are soon after several conversations have begun."""
    pipe.engine.open_company()
    pipe.engine.preparing_worker.run(lambda: None)
    if pipe.engine.target_worker.company is None:
        raise SystemExit("conversations take turns here: the target is no processor's, or there is no room")


def measure(
    sessions: Sequence[MirrorSession],
    asked: Sequence[Asked],
    users: Sequence[int],
    rounds: int,
    numbers: Sequence[runs.Changed | None] = (None,),
) -> list[dict[str, Any]]:
    """A row for each number of users, and of the scheduler's; every text must be that of the first round."""
    ways = [(count, number) for count in users for number in numbers]
    speeds: dict[tuple[int, runs.Changed | None], list[float]] = {way: [] for way in ways}
    known: list[list[int]] | None = None
    for _ in range(rounds):
        for way in ways:
            for session in sessions:
                session.forget()
            with runs.with_changed(way[1], _OWNERS):
                started = perf_counter()
                texts = answer(sessions[: way[0]], asked)
                seconds = perf_counter() - started
            speeds[way].append(sum(text.num_tokens for text in texts) / seconds)
            found = [text.token_ids for text in texts]
            known = known or found
            if found != known:
                raise SystemExit(f"{way[0]} users changed each other's texts")
    first = speeds[ways[0]]
    return [
        {
            "users": count,
            "with": str(number or ""),
            "tokens_per_second": round(median(found), 2),
            "gain": round(median(own / alone for own, alone in zip(found, first, strict=True)), 3),
        }
        for (count, number), found in speeds.items()
        if found
    ]


def standing_still(
    sessions: Sequence[MirrorSession], prompts: Sequence[runs.Messages], config: GenerationConfig, num_arriving: int
) -> dict[str, float]:
    """Times between two chunks of seven texts, before a long prompt comes and while it is read."""
    gaps: list[tuple[float, float]] = []
    settings = config.with_overrides({"ignore_eos": True})

    def read(session: MirrorSession, prompt: runs.Messages) -> None:
        last = 0.0
        for _ in session.stream(messages=prompt, config=settings):
            now = perf_counter()
            gaps.append((now, now - last if last else 0.0))
            last = now

    readers = [threading.Thread(target=read, args=pair) for pair in zip(sessions[:7], cycle(prompts), strict=False)]
    for reader in readers:
        reader.start()
    while len(gaps) < settings.max_new_tokens:  # a seventh of each text
        sleep(0.01)
    sessions[7].forget()
    began = perf_counter()
    ids = [number % _NUM_IDS for number in range(num_arriving)]
    sessions[7].generate(token_ids=ids, config=settings.with_overrides({"max_new_tokens": 1}))
    ended = perf_counter()
    for reader in readers:
        reader.join()
    before = sorted(gap for now, gap in gaps if gap and now < began)
    beside = sorted(gap for now, gap in gaps if began < now < ended)
    step = median(before)
    return {
        "step_ms": round(1e3 * step, 2),
        "p99_before": round(before[int(0.99 * len(before))] / step, 2),
        "p99_beside": round(beside[int(0.99 * len(beside))] / step, 2) if beside else 0.0,
        "read_s": round(ended - began, 2),
    }


def mixed(prompts: Sequence[runs.Messages], methods: Sequence[str], tokens: int) -> Iterator[Asked]:
    """Every method in every way, with another prompt and seed each time."""
    ways = cycle(product(methods, WAYS))
    for number, (prompt, (method, way)) in enumerate(zip(cycle(prompts), ways, strict=False)):
        seed = {"seed": number} if "temperature" in way else {}
        config = GenerationConfig(max_new_tokens=tokens, use_defaults=False, ignore_eos="regex" not in way)
        yield Asked(prompt, config.with_overrides({"method": method, **way, **seed}))


def count_different(sessions: Sequence[MirrorSession], asked: Sequence[Asked]) -> int:
    """Texts that are not, token by token and log-probability by log-probability, what one session says alone."""
    together = answer(sessions, asked)
    alone = answer(sessions[:1], asked)
    pairs = zip(together, alone, strict=True)
    return sum((one.token_ids, one.logprobs) != (other.token_ids, other.logprobs) for one, other in pairs)


def answer(sessions: Sequence[MirrorSession], asked: Sequence[Asked]) -> list[GenerationResult]:
    """Answers in the order of `asked`, from whichever session is free."""
    waiting = deque(enumerate(asked))
    found: dict[int, GenerationResult] = {}
    failures: list[BaseException] = []

    def work(session: MirrorSession) -> None:
        while waiting and not failures:
            try:
                number, (prompt, config) = waiting.popleft()
                found[number] = session.generate(messages=prompt, config=config)
            except IndexError:
                return
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [found[number] for number in range(len(asked))]


if __name__ == "__main__":
    main()
