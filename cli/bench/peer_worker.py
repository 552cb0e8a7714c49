"""One runtime decoding on request: the process that `peers` talks to, one per runtime and setting.

Reads one JSON object per line (`ids`, `most`, `ends`, `settings`, and for sampled texts `temperature` and `seed`),
answers with one (`ids`, `num_tokens`, `seconds`, `first_s`, `passes`). Every runtime gets the same prompt ids and the
same tokens that end a text, makes up to `most` new tokens and is timed from the request to the last token, prompt
included. Without `ends` the end of the text is ignored. A line with `several` (such objects) and `users` is answered
with `seconds` for all and `texts`: so many users take the prompts from one queue.
Runs in the peers' environment or in ours: only the runtime that is asked for is imported. What libraries print goes
to stderr.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, Protocol


class Decoded(NamedTuple):
    """New tokens, the target's passes they took and seconds to the first (None where the runtime does not say).

    `seconds` are those of the whole text, where not all of the call was for it.
    """

    ids: list[int]
    passes: int | None
    first_s: float | None = None
    seconds: float | None = None


class Asked(NamedTuple):
    """One request.

    Attributes:
        ids: the prompt.
        most: most new tokens.
        ends: tokens that end a text; none where the end of text is ignored.
        settings: the runtime's own, for this text: `num_drafted`, `longest_ngram`, or our `method`.
        temperature: 0 is greedy; above it, tokens are drawn from the whole distribution.
        seed: of the drawing.
    """

    ids: list[int]
    most: int
    ends: list[int]
    settings: dict[str, Any]
    temperature: float = 0.0
    seed: int = 0


class Runtime(Protocol):
    """What each adapter does."""

    def decode(self, asked: Asked) -> Decoded:
        """Decode after the prompt, up to `most` tokens or to one that ends the text."""

    def decode_several(self, asked: list[Asked], users: int) -> list[Decoded]:
        """The same for several, `users` of them at a time."""
        raise NotImplementedError(f"{type(self).__name__} decodes one text at a time here")

    def versions(self) -> dict[str, str]:
        """What it decodes with."""


class OpenVinoGenAi(Runtime):
    """openvino-genai's `LLMPipeline`, with its own defaults but for the threads and the options given.

    It keeps no prompt either: by default a second way to decode the same question would find it read.
    """

    def __init__(self, model: Path, draft: Path | None, threads: int, options: dict[str, Any]) -> None:
        import openvino_genai

        self._genai = openvino_genai
        properties = {"INFERENCE_NUM_THREADS": threads, **options}
        self._pipe: Any
        if properties.pop("most_users", None):
            self._pipe = openvino_genai.ContinuousBatchingPipeline(
                str(model), openvino_genai.SchedulerConfig(), "CPU", properties
            )
            return
        if draft is not None:
            properties["draft_model"] = openvino_genai.draft_model(str(draft), "CPU", INFERENCE_NUM_THREADS=threads)
        if properties.get("ATTENTION_BACKEND") != "SDPA":  # which has no pages
            properties["scheduler_config"] = openvino_genai.SchedulerConfig()
            properties["scheduler_config"].max_num_batched_tokens = sys.maxsize  # its own choice in this pipeline
        self._pipe = openvino_genai.LLMPipeline(str(model), "CPU", **properties)

    def decode(self, asked: Asked) -> Decoded:
        result = self._pipe.generate(self._prompt(asked), self._config(asked))
        first_s = result.perf_metrics.get_ttft().mean / 1e3
        return Decoded([int(token) for token in result.tokens[0]], None, first_s)

    def decode_several(self, asked: list[Asked], users: int) -> list[Decoded]:
        """Prompts join as others end; `ContinuousBatchingPipeline` puts all that run into each step."""
        running: dict[int, Any] = {}
        found: dict[int, Decoded] = {}
        waiting = list(enumerate(asked))[::-1]
        while running or waiting:
            while waiting and len(running) < users:
                number, one = waiting.pop()
                running[number] = self._pipe.add_request(number, self._prompt(one), self._config(one))
            self._pipe.step()
            for number, handle in list(running.items()):
                if handle.get_status() != self._genai.GenerationStatus.RUNNING:
                    (output,) = running.pop(number).read_all()
                    found[number] = Decoded([int(token) for token in output.generated_ids], None)
        return [found[number] for number in range(len(asked))]

    def _prompt(self, asked: Asked) -> Any:
        import numpy as np
        import openvino

        return openvino.Tensor(np.array([asked.ids], dtype=np.int64))

    def _config(self, asked: Asked) -> Any:
        config = self._genai.GenerationConfig(max_new_tokens=asked.most, ignore_eos=not asked.ends, do_sample=False)
        if asked.temperature:
            config.do_sample, config.temperature, config.rng_seed = True, asked.temperature, asked.seed
        if asked.ends:
            config.eos_token_id, config.stop_token_ids = asked.ends[0], set(asked.ends)
        if "num_drafted" in asked.settings:
            config.num_assistant_tokens = asked.settings["num_drafted"]
        if "longest_ngram" in asked.settings:
            config.max_ngram_size = asked.settings["longest_ngram"]
        return config

    def versions(self) -> dict[str, str]:
        return installed_versions("openvino-genai", "openvino")


class OnnxRuntimeGenAi(Runtime):
    """onnxruntime-genai's generator loop; `model` already names the draft, if there is one (see `prepare.py`)."""

    def __init__(self, model: Path, draft: Path | None, threads: int, options: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._genai, self._path = onnxruntime_genai, model
        self._settings = json.loads((model / "genai_config.json").read_text(encoding="utf-8"))["model"]
        self._session = {"intra_op_num_threads": threads, **options}
        self._models: dict[tuple[int, ...], Any] = {}

    def decode(self, asked: Asked) -> Decoded:
        """Continue `asked`; the token that ends the text is left out."""
        params = self._genai.GeneratorParams(self._model(asked.ends))
        params.set_search_options(max_length=len(asked.ids) + asked.most, do_sample=asked.temperature > 0)
        if asked.temperature:
            drawn = {"temperature": asked.temperature, "top_k": 0, "top_p": 1.0, "random_seed": asked.seed}
            params.set_search_options(**drawn)
        num_drafted = asked.settings.get("num_drafted", 0)
        if num_drafted:
            params.set_speculative_options(max_draft_tokens=num_drafted)
        generator = self._genai.Generator(self._model(asked.ends), params)
        started = perf_counter()
        generator.append_tokens(asked.ids)
        first_s = None
        while not generator.is_done():
            generator.generate_next_token()
            first_s = first_s or perf_counter() - started
        tokens = [int(token) for token in generator.get_sequence(0)][len(asked.ids) :]
        passes = generator.get_speculative_stats()["target_forward_passes"] if num_drafted else None
        return Decoded(tokens, passes, first_s)

    def versions(self) -> dict[str, str]:
        return installed_versions("onnxruntime-genai", "onnxruntime")

    def _model(self, ends: list[int]) -> Any:
        """The model, loaded once per way to end: that is a part of its configuration."""
        key = tuple(ends)
        if key not in self._models:
            parts = ("decoder", "draft") if "draft" in self._settings else ("decoder",)
            overlay: dict[str, Any] = {part: {"session_options": self._session} for part in parts}
            first, *others = ends or [never_said(self._settings)]
            config = self._genai.Config(str(self._path))
            config.overlay(json.dumps({"model": overlay | {"eos_token_id": first}}))  # a number replaces its own ends,
            for end in others:
                config.overlay(json.dumps({"model": {"eos_token_id": [end]}}))  # and a list is added to them
            self._models[key] = self._genai.Model(config)
        return self._models[key]


def never_said(settings: dict[str, Any]) -> int:
    """A token to wait for in vain where the end of text is ignored: padding, unless it ends texts; else the last id.

    `min_length` would forbid the token that ends the text to onnxruntime-genai, and so change the text.

    >>> never_said({"eos_token_id": [1, 2], "pad_token_id": 0, "vocab_size": 9})
    0
    >>> never_said({"eos_token_id": 8, "pad_token_id": 8, "vocab_size": 9})
    7
    """
    own = settings["eos_token_id"]
    ends = set(own if isinstance(own, list) else [own])
    candidates = (settings["pad_token_id"], *reversed(range(settings["vocab_size"])))
    return next(int(token) for token in candidates if token not in ends)


class LlamaCpp(Runtime):
    """llama.cpp's own server, a process of this one (see `llama_server`). This process is of our environment."""

    def __init__(self, model: Path, draft: Path | None, threads: int, options: dict[str, Any]) -> None:
        from mirrorsd.cli.bench.llama_server import LlamaServer

        self._server = LlamaServer(model, draft, threads, options)

    def decode(self, asked: Asked) -> Decoded:
        """Continue `asked`; the token that ends the text is left out."""
        found = self._server.decode(asked.ids, asked.most, asked.ends, temperature=asked.temperature, seed=asked.seed)
        return Decoded(*found)

    def decode_several(self, asked: list[Asked], users: int) -> list[Decoded]:
        """As many requests at a time; the server batches them."""
        with ThreadPoolExecutor(users) as pool:
            return list(pool.map(self.decode, asked))

    def versions(self) -> dict[str, str]:
        return self._server.versions()


class Mirrorsd(Runtime):
    """Our own pipeline; `options` name the device map, and may set `speculation` (else what `tune` found)."""

    def __init__(self, model: Path, draft: Path | None, threads: int, options: dict[str, Any]) -> None:
        from mirrorsd import MirrorPipeline

        settings = options.get("speculation")
        self._pipe = MirrorPipeline.load(
            model, device_map=options["device_map"], speculation=settings, use_tuned=settings is None
        )
        self._sessions: dict[tuple[str, int], Any] = {}

    def decode(self, asked: Asked, user: int = 0) -> Decoded:
        """Continue `asked` in a session per method and user, which forgets: none finds a prompt that was read."""
        method = asked.settings["method"]
        if (method, user) not in self._sessions:
            self._sessions[method, user] = self._pipe.session()
        session = self._sessions[method, user]
        session.forget()
        started = perf_counter()
        result = session.generate(
            token_ids=asked.ids,
            max_new_tokens=asked.most,
            temperature=asked.temperature,
            ignore_eos=True,
            stop_token_ids=asked.ends,
            method=method,
            use_defaults=False,
            **({"seed": asked.seed} if asked.temperature else {}),
        )
        seconds, first_s = perf_counter() - started, result.stats.time_to_first_token_ms / 1e3
        return Decoded(list(result.token_ids), result.stats.steps, first_s, seconds)

    def decode_several(self, asked: list[Asked], users: int) -> list[Decoded]:
        """A thread and a session for each user."""
        free: SimpleQueue[int] = SimpleQueue()
        for user in range(users):
            free.put(user)

        def answer(one: Asked) -> Decoded:
            user = free.get()
            try:
                return self.decode(one, user)
            finally:
                free.put(user)

        with ThreadPoolExecutor(users) as pool:
            return list(pool.map(answer, asked))

    def versions(self) -> dict[str, str]:
        return installed_versions("openvino", "onnxruntime")


def count_tokens(ids: list[int], asked: Asked) -> tuple[list[int], int]:
    """The text without the token that ends it, and how many tokens were decoded, that one included.

    Some runtimes return the token that ends the text, some leave it out; all have decoded it.

    >>> asked = Asked(ids=[5], most=4, ends=[2], settings={})
    >>> count_tokens([7, 8, 2], asked), count_tokens([7, 8], asked), count_tokens([7, 8, 9, 9], asked)
    (([7, 8], 3), ([7, 8], 3), ([7, 8, 9, 9], 4))
    """
    place = next((index for index, token in enumerate(ids) if token in asked.ends), len(ids))
    return ids[:place], min(place + 1, asked.most)


RUNTIMES: dict[str, Callable[[Path, Path | None, int, dict[str, Any]], Runtime]] = {
    "openvino-genai": OpenVinoGenAi,
    "onnxruntime-genai": OnnxRuntimeGenAi,
    "llama.cpp": LlamaCpp,
    "mirrorsd": Mirrorsd,
}


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of those packages that this environment has."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def leave_own_folder() -> None:
    """Have nobody import a module of this file's folder in place of a package of that name."""
    own = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != own]


def main() -> None:
    """Load, say so, and answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtime", choices=RUNTIMES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--options", default="{}", help="JSON: the runtime's own settings")
    options = parser.parse_args()
    leave_own_folder()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asked: SimpleQueue[str] = SimpleQueue()
    is_ready = threading.Event()
    threading.Thread(target=listen, args=(asked, is_ready), daemon=True).start()
    try:
        runtime = RUNTIMES[options.runtime](options.model, options.draft, options.threads, json.loads(options.options))
    except Exception as error:  # of whatever runtime
        sys.exit(f"{options.runtime} cannot load {options.model}: {type(error).__name__}: {error}")
    is_ready.set()
    print(json.dumps({"ready": True, "versions": runtime.versions()}), file=answers, flush=True)
    while line := asked.get():
        print(json.dumps(answer_to(runtime, json.loads(line))), file=answers, flush=True)


def listen(asked: "SimpleQueue[str]", is_ready: threading.Event) -> None:
    """Hand on what is asked, behind the last an empty line; nobody waits for a model any more once the input ends."""
    for line in sys.stdin:
        asked.put(line)
    if not is_ready.is_set() and asked.empty():
        if sys.platform != "win32" and os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)  # what it started, too
        os._exit(1)
    asked.put("")


def answer_to(runtime: Runtime, words: dict[str, Any]) -> dict[str, Any]:
    """What a line is answered with."""
    several = [Asked(**one) for one in words.get("several", ())]
    request = None if several else Asked(**words)
    started = perf_counter()
    if request is None:
        decoded = runtime.decode_several(several, words["users"])
        seconds = perf_counter() - started
        return {"seconds": seconds, "texts": [text_of(*pair) for pair in zip(decoded, several, strict=True)]}
    found = runtime.decode(request)
    seconds = found.seconds or perf_counter() - started
    return text_of(found, request) | {"seconds": seconds, "first_s": found.first_s, "passes": found.passes}


def text_of(decoded: Decoded, asked: Asked) -> dict[str, Any]:
    """The text and how many tokens were decoded.

    Raises:
        SystemExit: the text should not have ended, and did.
    """
    ids, num_tokens = count_tokens(decoded.ids, asked)
    if not asked.ends and len(ids) != asked.most:
        raise SystemExit(f"a text of {len(ids)} tokens came, {asked.most} were asked for")
    return {"ids": ids, "num_tokens": num_tokens}


if __name__ == "__main__":
    main()
