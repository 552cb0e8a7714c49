"""Write `docs/measurements.md` from the reports in `bench/results`: one folder per machine, the newest run of each.

    python bench/measurements.py            # write the page
    python bench/measurements.py --check    # exit status 1 if the page is not what the reports say

Owns: which figures of a report the page shows, and the words above them. Does not own: measuring.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "measurements.md"
PLACES = ("real", "paced", "simulated")
Report = dict[str, Any]
Row = tuple[str, ...]

HEAD = """# Measurements

Made by `python bench/measurements.py` from the reports in [bench/results](../bench/results).
Each line links to its report, which names the machine, the versions and every single figure.

Speeds are tokens per second. They leave the prompt out unless a table says otherwise. *Over plain* is the speed over
plain decoding's in the same run. Texts end where the model ends them unless a line says *ends ignored*.

The models: the *storyteller*, 10 million parameters, trained in this repository, and the same *scaled* to 82 million,
which computes eight times as much for the same text (`samples/scale_up.py`). *Paced* means: the real pipeline on this
machine, slowed to the times on a device card. A paced row shows the scheduling, and forecasts nothing.
"""
SWEEPS = """Both models on the same two cores, after `mirrorsd tune B --device-map cpu`: the best of several settings of
each method, and `auto`. Command: `python bench/claims/sweep.py B --device-map cpu --work FILE`."""
PEERS = """The same checkpoints on the same cores, each runtime in its best way: plain, with a draft, with lookup,
2 to 12 drafted tokens. The prompt is part of the time. *auto / it* is our `auto` over that runtime.
In the report ending in `_fitted`, openvino-genai's int4 model is fitted to the same text as ours.
In the one ending in `_t1` tokens are drawn at temperature 1.
Command: `python bench/claims/peers/compare.py` ([page](peers.md))."""
EXACT = """Texts that every method wrote alike. Command: `python bench/claims/exactness.py B`."""
PACED = """Six tasks. An ordinary draft guesses a token per pass.
Command: `python bench/claims/tasks.py storyteller.mirror --ordinary plain.mirror --device-map CARD`."""
METHODS = """The same questions by every method that a bundle has the parts for. *Trained* are seconds of a core or a
clock. *Real* is two cores of this machine; *paced* and *simulated* are devices that are not there. In brackets:
times plain. Texts of all methods and places are the same. Drafts guess by themselves here (`-S repeats=no`): now their
guesses lean on the text, too. SmolLM2's rows had an earlier draft.
Command: `python bench/claims/methods.py B --work FOLDER`."""
METHODS_BY_TASK = """The same reports by task: tokens per step (real / paced), and behind the colon times plain of the
real, the paced and the simulated run."""
GPU = """Bundles in fp16 on a server's GPU, which is far faster than a desktop's. The draft computes on the processor,
and a pass is over before a round of it is. Command: `python bench/studies/gpu.py B`."""
GPU_TEXTS = """Eight questions of Spec-Bench on the same machine, 128 tokens at most, greedy. The first run had passes
of other sizes, which round otherwise, so that near ties part some texts. Since then all passes have one size there
([exactness](exactness.md#to-the-last-bit)).
Command: `mirrorsd compare B --device-map cuda-cpu --prompts QUESTIONS --methods plain,serial,mirror,auto,lookup`."""
OTHERS = """Studies of single parts, and runs of earlier states. What each measures stands at the top of the script of
that name in `bench/`."""


class Section(NamedTuple):
    """A table of the page: reports whose names begin with one of `prefixes`, a command, and what their rows say."""

    title: str
    prefixes: tuple[str, ...]
    words: str
    columns: Row
    rows: Callable[[Report], Iterable[Row]]


def number(value: object, digits: int = 2) -> str:
    """A figure as the page shows it; a dash where there is none."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def best(rows: list[Report], method: str) -> Report:
    """The fastest row of a method, in whatever layout and with whatever windows."""
    return max(
        (row for row in rows if method in row["arm"].split(",")[0].split()), key=lambda r: r["tokens_per_second"]
    )


def sweep_rows(report: Report) -> Iterable[Row]:
    """Plain, serial and mirror by their best settings, and `auto`."""
    rows = report["rows"]
    plain = best(rows, "plain")["tokens_per_second"]
    setting = f"{report['bundle'].removesuffix('.mirror')}, T = {report['temperature']:g}{ends(report)}"
    cells = []
    for method in ("plain", "serial", "mirror", "auto"):
        speed = best(rows, method)["tokens_per_second"]
        cells.append(number(speed, 0) if method == "plain" else f"{number(speed, 0)} ({number(speed / plain)})")
    yield (setting, *cells, number(report["auto_to_best"]), str(report["different_texts"]))


def task_rows(report: Report) -> Iterable[Row]:
    """Every way to decode, as the mean of the tasks, and its best task."""
    setting = f"{report['device_map']}, T = {report['temperature']:g}{ends(report)}"
    for row in report["rows"]:
        if row["task"] != "all":
            continue
        of_tasks = {r["task"]: r["over_plain"] for r in report["rows"] if r["setting"] == row["setting"]}
        of_tasks.pop("all")
        task = max(of_tasks, key=lambda name: of_tasks[name])
        cells = (number(row["tokens_per_second"], 0), number(row["over_plain"]), f"{task} {number(of_tasks[task])}")
        yield (setting, row["setting"], *cells, number(row["tokens_per_step"], 1), number(row["reuse_rate"]))


def method_rows(report: Report) -> Iterable[Row]:
    """Every method over all tasks: what it needs, and its speeds."""
    for row in report["rows"]:
        if row["task"] == "all":
            needs = report["methods"][row["method"]]
            parts = (f"{needs['parameters'] / 1e6:.1f} M", number(needs["training_seconds"], 0))
            cells = (f"{number(row[place]['tokens_per_second'], 0)} ({times_plain(row, place)})" for place in PLACES)
            yield (method_setting(report, row), row["method"], *parts, per_step(row), *cells)
    for name in report["absent"]:
        yield (report["bundle"].removesuffix(".mirror"), name, *(["not in the bundle"] + ["-"] * 5))


def method_task_rows(report: Report) -> Iterable[Row]:
    """Every method task by task."""
    of_method: dict[Row, list[str]] = {}
    for row in report["rows"]:
        speeds = " ".join(times_plain(row, place) for place in PLACES)
        cell = f"{per_step(row)}: {speeds}"
        of_method.setdefault((method_setting(report, row), row["method"]), []).append(f"{row['task']} {cell}")
    for setting, cells in of_method.items():
        yield (*setting, "; ".join(cells[:-1]))


def method_setting(report: Report, row: Report) -> str:
    """The bundle and the temperature of a row, and what is to be known of its report."""
    note = f"; {report['note']}" if "note" in report else ""
    return f"{report['bundle'].removesuffix('.mirror')}, T = {row['temperature']:g}{ends(report)}{note}"


def per_step(row: Report) -> str:
    """Tokens per step of the real and of the paced run, whose windows are of other lengths."""
    return " / ".join(number(row[place]["tokens_per_step"]) for place in PLACES[:2])


def times_plain(row: Report, place: str) -> str:
    """A row's speed at a place over plain decoding's there."""
    return number(row[place]["over_plain"])


def peer_rows(report: Report) -> Iterable[Row]:
    """The best way of every runtime, prompt included."""
    for runtime, row in report["best"].items():
        way = row["name"].removeprefix(runtime).strip(" ,:") or "plain"
        yield (report["precision"], runtime, way, number(row["tokens_per_second"], 0), number(row["auto_to_it"]))


def exactness_rows(report: Report) -> Iterable[Row]:
    """How many texts of all methods are plain decoding's."""
    methods = ", ".join(report.get("methods", ("plain", "serial", "mirror")))
    for found in report["results"]:
        rows = f"{found['pad_rows_to']} rows" if found["pad_rows_to"] else "as needed"
        same = "all" if found["identical"] else f"{len(found['differences'])} differ"
        setting = f"{found['setting']}{ends(report)}"
        yield (report["bundle"].removesuffix(".mirror"), setting, methods, rows, str(found["texts"]), same)


def ends(report: Report) -> str:
    """What a line adds where texts went on after their end."""
    return ", ends ignored" if report.get("ends", "ignored") == "ignored" else ""


def gpu_rows(report: Report) -> Iterable[Row]:
    """A bundle's passes, and how near its logits are to a processor's."""
    for found in report["bundles"]:
        passes = (number(found["pass_ms"][rows]) for rows in ("1", "2", "8", "16"))
        nearness = (f"{found['largest_error']:.2g}", f"{found['same_top1']:.1%}")
        name = f"{found['bundle'].removesuffix('.mirror')}, {found['precision']}"
        yield (name, *passes, number(found["floor_ms"]), *nearness)


def compare_rows(report: Report) -> Iterable[Row]:
    """Every method on one machine."""
    texts = "all the same" if report["identical"] else "some differ"
    for row in report["rows"]:
        speeds = (number(row["tokens_per_second"], 0), number(row["times_plain"]), number(row["tokens_per_step"]))
        yield (report["bundle"].removesuffix(".mirror"), row["method"], *speeds, texts)


SECTIONS = (
    Section(
        "Real: two cores of a processor",
        ("sweep_",),
        SWEEPS,
        ("bundle", "plain", "serial (over plain)", "mirror", "auto", "auto / best", "texts that differ"),
        sweep_rows,
    ),
    Section(
        "Real: a GPU",
        ("gpu_",),
        GPU,
        (
            "bundle",
            "pass of 1 row, ms",
            "2 rows",
            "8",
            "16",
            "reading the weights once",
            "largest error",
            "same best token",
        ),
        gpu_rows,
    ),
    Section(
        "Real: texts on a GPU",
        ("compare_",),
        GPU_TEXTS,
        ("bundle", "method", "tokens/s", "over plain", "tokens per step", "texts"),
        compare_rows,
    ),
    Section(
        "Beside other runtimes",
        ("peers_",),
        PEERS,
        ("precision", "runtime", "its best way", "tokens/s", "auto / it"),
        peer_rows,
    ),
    Section(
        "Exactness",
        ("exactness_",),
        EXACT,
        ("bundle", "sampling", "methods", "rows of a pass", "texts", "same"),
        exactness_rows,
    ),
    Section(
        "Paced: devices that are not there",
        ("tasks_paced",),
        PACED,
        ("card", "method", "tokens/s", "over plain", "best task", "tokens per step", "windows reused"),
        task_rows,
    ),
    Section(
        "Every method on one target",
        ("methods_",),
        METHODS,
        ("bundle", "method", "parameters", "trained", "tokens per step, real / paced", *PLACES),
        method_rows,
    ),
    Section("Every method by task", ("methods_",), METHODS_BY_TASK, ("bundle", "method", "tasks"), method_task_rows),
)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    shown: set[Path] = set()
    for section in SECTIONS:
        parts.append(f"## {section.title}\n\n{section.words}\n")
        for machine in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
            found = [path for path in sorted(machine.glob("*.json")) if path.name.startswith(section.prefixes)]
            tables = [(path, read(path)) for path in found]
            current = [(path, report) for path, report in tables if is_current(path, report)]
            shown |= {path for path, _ in current}
            if current:
                parts.append(f"{describe(current[0][1])}:\n\n{table(section, current)}\n")
    others = [path for path in sorted(RESULTS.rglob("*.json")) if path not in shown]
    lines = [f"| {link(path)} | {describe(read(path))} |" for path in others]
    parts.append("\n".join(["## Other reports", "", OTHERS, "", "| report | machine |", "|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def is_current(path: Path, report: Report) -> bool:
    """Whether a report says how its texts ended: those from before that was honoured do not."""
    return "ends" in report and (not path.name.startswith("peers_") or "best" in report)


def table(section: Section, reports: list[tuple[Path, Report]]) -> str:
    """A table with a link to the report in every row."""
    lines = [f"| {' | '.join(section.columns)} | report |", "|" + "---|" * (len(section.columns) + 1)]
    lines += [f"| {' | '.join(row)} | {link(path)} |" for path, report in reports for row in section.rows(report)]
    return "\n".join(lines)


def link(path: Path) -> str:
    """A link from the page to a report."""
    return f"[{path.stem}](../{path.relative_to(ROOT).as_posix()})"


def describe(report: Report) -> str:
    """The machine of a report in a few words, or the one that was not there."""
    if "platform" in report:
        return f"NPU {report['platform']}: estimated by the vendor's compiler, not measured"
    machine = report.get("machine") or {}
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    return f"{gpu}{machine.get('processor', 'processor not noted')}, {machine.get('cores', '?')} cores"


def read(path: Path) -> Report:
    """A report."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return document if isinstance(document, dict) else {"rows": document}


def main() -> int:
    """Write the page, or say whether it is the right one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    wanted = page()
    if not parser.parse_args().check:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    is_right = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted
    print("the page is what the reports say" if is_right else "run: python bench/measurements.py")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
