"""Several users of one model: our runtime, openvino-genai's continuous batching and llama.cpp's server, by turns.

    python bench/claims/peers/users.py CACHE BUNDLE --target scaled --precision int8 --prompts FILE.jsonl \
        --llama-cpp FOLDER --users 1,4,8

Users take the prompts from one queue: whenever a text has ended, the next prompt begins. Tokens per second are those
of all texts over the time until the last one has ended, prompts included, greedily. Contestants and numbers of users
take turns, round by round; a figure is the median of the rounds, with the least and the most. Ours is also compared
with itself alone, text by text. With `--journal` what is measured is kept, and the next run goes on from there.

Owns: rounds and their report. Does not own: who takes part (`ways.py`), processes (`turns.py`), how a runtime batches
(`cli/bench/peer_worker.py`).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from mirrorsd.bench.claims.peers import compare
from mirrorsd.bench.claims.peers.journal import Journal
from mirrorsd.bench.claims.peers.turns import WARM_UP_TOKENS, Company, Contestant, Limits, ask, undisturbed
from mirrorsd.bench.claims.peers.ways import entries_for_users
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs.bundle_files import read_bundle

OWN = "mirrorsd"


def main() -> None:
    """Measure, print and write the report."""
    options = parse_arguments()
    options.most_users = max(options.users)
    asked = compare.read_prompts(options)
    report = compare.head_of(options, asked) | {"users": options.users}
    journal = Journal(options.journal, report)
    with Company(entries_for_users(options), options.cache, options.threads) as company:
        measure(company, asked.ids, journal, options)
        versions = installed_versions() | compare.peer_versions(options.cache) | company.versions
        names = {one.name: one.runtime for one in company.contestants}
        report |= {"refused": company.refused, "machine": describe_machine(), "versions": versions}
    report |= results_of(journal, names, options.users) | {"quality": compare.quality_of(options)}
    print_table(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = compare.arguments(__doc__, tokens=64, per_task=6)
    parser.add_argument("--users", type=lambda text: [int(word) for word in text.split(",")], default=[1, 4, 8])
    parser.add_argument("--methods", default="plain,auto", help="ours")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.set_defaults(ignore_eos=False, temperature=0.0, seed=0)
    return parser.parse_args()


def measure(company: Company, prompts: dict[str, list[int]], journal: Journal, options: argparse.Namespace) -> None:
    """A round is every contestant with every number of users; none is begun after so many minutes."""
    limits = Limits(options.tokens, tuple(read_bundle(options.bundle).tokens.eos_ids))
    short, ids = limits._replace(most=min(options.tokens, WARM_UP_TOKENS)), [*prompts.values()]
    most = options.most_users
    ask(company, company.contestants, lambda one: one.decode_several(ids[:most], short, most))
    deadline = perf_counter() + 60 * options.minutes
    for number in range(options.repeats):
        for users in options.users:
            name = str(users)
            missing = [one for one in company.contestants if len(journal.of(one.name, name)) <= number]
            if missing and perf_counter() > deadline:
                return
            shift = number % max(1, len(missing))
            ordered = (*missing[shift:], *missing[:shift])
            for contestant, answer in ask(company, ordered, partial(decode_together, company, ids, limits, users)):
                journal.add(contestant.name, name, answer)
            print(f"round {number + 1} of {options.repeats}, {users} users", file=sys.stderr)


def decode_together(
    company: Company, prompts: Sequence[list[int]], limits: Limits, users: int, one: Contestant
) -> dict[str, Any]:
    """All texts by one of them, on a quiet machine."""
    return undisturbed(company.contestants, lambda: one.decode_several(prompts, limits, users))


def results_of(journal: Journal, names: dict[str, str], users: list[int]) -> dict[str, Any]:
    """A row for each contestant and number of users; what our best has over each peer; our texts against one user's."""
    rows: list[dict[str, Any]] = []
    different = 0
    for name, runtime in names.items():
        for number in users:
            found = journal.of(name, str(number))
            if not found:
                continue
            rows.append({"name": name, "runtime": runtime, "users": number, **summed(found)})
            if runtime == OWN:
                alone = journal.of(name, str(users[0]))[0]["texts"]
                pairs = [pair for each in found for pair in zip(each["texts"], alone, strict=True)]
                different += sum(one != other for one, other in pairs)
    over = {f"{number} users": over_peers([row for row in rows if row["users"] == number]) for number in users}
    return {"rows": rows, "over": {number: found for number, found in over.items() if found}, "different": different}


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per second of the rounds: all tokens over all seconds."""
    speeds = [sum(text["num_tokens"] for text in each["texts"]) / each["seconds"] for each in found]
    least, most, middle = min(speeds), max(speeds), median(speeds)
    return {
        "tokens_per_second": round(middle, 2),
        "least": round(least, 2),
        "most": round(most, 2),
        "rounds": len(speeds),
        "disturbed": round(max(each.get("share", 0.0) for each in found), 3),
    }


def over_peers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each of our methods over each peer, which decodes plainly."""
    ours, peers = ([row for row in rows if (row["runtime"] == OWN) is own] for own in (True, False))
    return {
        f"{own['name']} / {peer['name']}": round(own["tokens_per_second"] / peer["tokens_per_second"], 3)
        for own in ours
        for peer in peers
    }


def print_table(report: dict[str, Any]) -> None:
    """A line per contestant and number of users."""
    num_prompts = len(report["prompts"])
    print(f"{report['precision']}: {num_prompts} prompts, up to {report['tokens']} tokens; {report['processor']}")
    for row in report["rows"]:
        spread = f"{row['least']:.1f} to {row['most']:.1f} in {row['rounds']} rounds"
        print(f"{row['name']:40s}{row['users']:3d} users{row['tokens_per_second']:10.1f} tokens/s  {spread}")
    for number, found in report["over"].items():
        print(f"ours over the peers, {number}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    print(f"{report['different']} of our texts differ from those of one user")
    for name, why in report["refused"].items():
        print(f"{name} took no part: {why.splitlines()[0]}")


if __name__ == "__main__":
    main()
