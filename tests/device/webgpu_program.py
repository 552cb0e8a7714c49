"""A program for a test: bundles on ONNX Runtime's WebGPU provider, in an environment that has it. Prints JSON.

webgpu_program.py texts BUNDLE      every method's greedy and sampled texts, and two sessions at once
webgpu_program.py filtered BUNDLE   the same filtered texts from whole rows and from their best logits
webgpu_program.py passes BUNDLE     logits of a prompt, of a window, and of rows behind a rollback; nodes by provider
webgpu_program.py trees BUNDLE      texts with siblings, how many there were, and logits of a tree and of its chains
webgpu_program.py memory BUNDLE     megabytes that 30 requests leave behind, after 10 others
webgpu_program.py long_memory BUNDLE  the same of 200
webgpu_program.py refused BUNDLE    what is said where the bundle does not load
webgpu_program.py lost BUNDLE       what is said where the device goes in the middle of a text, and afterwards
webgpu_program.py texts,memory BUNDLE    several, one after the other: to start costs more than most of them
"""

import gc
import json
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from mirrorsd import MirrorPipeline
from mirrorsd.device_maps import load_device_map
from mirrorsd.devices.onnxruntime import device_memory
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import MirrorError
from mirrorsd.runtime.backends.onnxruntime import bound_pass
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger

CARD = "webgpu-cpu"
PROMPTS = ("Once upon a time the fox", "The old heron said")
METHODS = ("plain", "serial", "mirror", "auto")
SETTINGS = {"max_new_tokens": 12, "ignore_eos": True}
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
FILTERS: tuple[dict[str, float], ...] = ({"top_k": 8}, {"top_k": 12, "top_p": 0.9}, {"min_p": 0.1})
PASSES = (([5, 9, 100, 7, 45, 6, 7, 8, 9], 0), ([3, 4, 5, 6], 9), ([7, 8], 11), ([1], 13))
"""Tokens and where they stand: the third pass takes the rows of the second one back."""
TREE = ([3, 4, 5, 11, 12, 13], [-1, 0, 1, 0, 1, 4])
"""A chain of three, 11 beside its second, 12 beside its third, 13 behind that."""


def texts(bundle: Path) -> dict[str, object]:
    """Tokens by method and way of choosing; then of two sessions that write at once."""
    with MirrorPipeline.load(bundle, device_map=CARD) as pipe:
        found = {
            f"{method} {way}": pipe.generate(PROMPTS[0], method=method, **SETTINGS, **sampling).token_ids
            for method in METHODS
            for way, sampling in (("greedy", {}), ("sampled", SAMPLING))
        }
        alone = [found["serial greedy"], pipe.generate(PROMPTS[1], method="serial", **SETTINGS).token_ids]
        with pipe.session() as first, pipe.session() as second, ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(one.generate, prompt, method="serial", **SETTINGS)
                for one, prompt in zip((first, second), PROMPTS, strict=True)
            ]
            together = [future.result(200).token_ids for future in asked]
        return {"texts": found, "alone": alone, "together": together, "placement": pipe.placement}


def filtered(bundle: Path) -> dict[str, object]:
    """Tokens by how rows were read, and how many passes the best logits were enough for."""
    device_memory.NUM_BEST = 24  # the tests' vocabulary is small
    judge, enough = bound_pass.short_rows, Counter[bool]()

    def counted(*arguments: Any) -> Any:
        rows = judge(*arguments)
        enough[rows is not None] += 1
        return rows

    settings: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    found = {}
    for way in ("best", "whole"):
        bound_pass.short_rows = counted if way == "best" else lambda *_: None  # type: ignore[assignment]
        with MirrorPipeline.load(bundle, device_map=CARD) as pipe:
            found[way] = [
                pipe.generate(PROMPTS[0], method="serial", **settings, **chosen).token_ids for chosen in FILTERS
            ]
    return {**found, "enough": enough[True], "not enough": enough[False]}


def passes(bundle: Path) -> dict[str, object]:
    """Logits `[rows, V]` of each of `PASSES`, and how many nodes ran where, as the profiler saw it."""
    target = OnnxTargetModel(bundle, read_bundle(bundle).target, load_device_map(CARD).target).new_session()
    outputs = [target.run(np.array(tokens), start, with_logits=True, ledger=Ledger()) for tokens, start in PASSES]
    found = [output.logits.tolist() for output in outputs if output.logits is not None]
    target.close()
    return {"logits": found, "ids": [output.argmax_ids.tolist() for output in outputs], "nodes": profiled(bundle)}


def trees(bundle: Path) -> dict[str, object]:
    """Tokens by method with siblings; logits of `TREE`'s rows, and of each one's path alone."""
    found: dict[str, list[int]] = {}
    with MirrorPipeline.load(bundle, device_map=CARD, speculation={"siblings": 6}, use_tuned=False) as pipe:
        pipe.engine.known.target_ms = ((1.0, 10.0), (32.0, 10.1))  # rows of a software GPU are not free
        num_siblings = 0
        for method in METHODS[1:]:
            for way, sampling in (("greedy", {}), ("sampled", SAMPLING)):
                result = pipe.generate(PROMPTS[0], method=method, **SETTINGS, **sampling)
                found[f"{method} {way}"] = result.token_ids
                num_siblings += sum(step.num_siblings for step in result.steps)
    target = load_device_map(CARD).target
    model = OnnxTargetModel(bundle, read_bundle(bundle).target, target, takes_trees=True)
    session = model.new_session()
    (tokens, start), (rows, parents) = PASSES[0], TREE

    def logits(asked: list[int], followed: list[int] | None) -> Any:
        session.prefill(np.array(tokens), start, ledger=Ledger())
        given = None if followed is None else np.array(followed)
        output = session.run(np.array(asked), len(tokens), with_logits=True, ledger=Ledger(), parents=given)
        assert output.logits is not None
        return output.logits.tolist()

    alone = []
    for row in range(len(rows)):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone.append(logits([rows[one] for one in path], None)[-1])
    together = logits(rows, parents)
    session.close()
    return {"texts": found, "siblings": num_siblings, "together": together, "alone": alone}


def profiled(bundle: Path) -> dict[str, int]:
    """Nodes by provider that computed in one run of the last stage and of each exit, from host memory."""
    counts: Counter[str] = Counter()
    for path in sorted((bundle / "target").glob("exit*.onnx")):
        options = ort.SessionOptions()
        options.enable_profiling, options.log_severity_level = True, 3
        options.profile_file_prefix = str(Path(tempfile.mkdtemp()) / "profile")
        session = ort.InferenceSession(path, options, providers=["WebGpuExecutionProvider"], enable_fallback=0)
        (hidden,) = session.get_inputs()
        session.run(None, {hidden.name: np.ones((1, 3, hidden.shape[2]), np.float32)})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        counts.update(event["args"]["provider"] for event in events if event["name"].endswith("_kernel_time"))
    return dict(counts)


def memory(bundle: Path, count: int = 30) -> dict[str, object]:
    """A software GPU's memory is the process's own."""

    def megabytes() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6

    def use(count: int) -> float:
        for number in range(count):
            with pipe.session() as session:
                session.generate(PROMPTS[number % 2], max_new_tokens=1, ignore_eos=True, method="plain")
        return megabytes()

    with MirrorPipeline.load(bundle, device_map=CARD) as pipe:
        before = use(10)
        return {"left": use(count) - before}


def long_memory(bundle: Path) -> dict[str, object]:
    """As `memory`, of more requests."""
    return memory(bundle, 200)


def refused(bundle: Path) -> dict[str, object]:
    """The error's class and words."""
    try:
        MirrorPipeline.load(bundle, device_map=CARD).close()
    except MirrorError as error:
        return {"error": type(error).__name__, "words": str(error)}
    return {"error": None}


def lost(bundle: Path) -> dict[str, object]:
    """Tokens until the device goes, then the errors of that text, of the next one, and of another session's."""
    sign = Path(os.environ["LOSE_DEVICE"])
    tokens: list[int] = []
    errors: list[tuple[str, str]] = []
    settings = {"max_new_tokens": 24, "ignore_eos": True, "method": "mirror"}
    with MirrorPipeline.load(bundle, device_map=CARD) as pipe, pipe.session() as other:
        alone = pipe.generate(PROMPTS[0], **settings).token_ids
        try:
            for chunk in pipe.stream(PROMPTS[0], **settings):
                tokens += [token.id for token in chunk.tokens]
                if len(tokens) >= 4:
                    sign.touch()
        except MirrorError as error:
            errors.append((type(error).__name__, str(error)))
        for ask in (pipe.generate, other.generate):
            try:
                ask(PROMPTS[1], **settings)
            except MirrorError as error:
                errors.append((type(error).__name__, str(error)))
    return {"alone": alone, "tokens": tokens, "errors": errors}


if __name__ == "__main__":
    jobs = {job.__name__: job for job in (texts, filtered, passes, trees, memory, long_memory, refused, lost)}
    print(json.dumps({name: jobs[name](Path(sys.argv[2])) for name in sys.argv[1].split(",")}))
