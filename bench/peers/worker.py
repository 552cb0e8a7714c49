"""One runtime decoding greedily on request: the process that `compare.py` talks to, one per runtime and setting.

Reads one JSON object per line (`ids`, `count`), answers with one (`ids`, `seconds`, `passes`). Every runtime gets the
same prompt ids, makes exactly `count` new tokens and is timed from the request to the last token, prompt included.
Runs in the peers' environment or in ours: only the runtime that is asked for is imported. What libraries print goes
to stderr.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol


class Decoded(NamedTuple):
    """New tokens, and the target's passes they took (None where the runtime does not say)."""

    ids: list[int]
    passes: int | None


class Runtime(Protocol):
    """What each adapter does."""

    def decode(self, ids: list[int], count: int) -> Decoded:
        """Decode `count` tokens greedily after `ids`; the end of the text is ignored."""


class OpenVinoGenAi:
    """openvino-genai's `LLMPipeline`, with its own defaults but for the threads and the options given."""

    def __init__(self, model: Path, draft: Path | None, threads: int, options: dict[str, Any]) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self._num_drafted, self._longest_ngram = options.pop("num_drafted", 0), options.pop("longest_ngram", 0)
        properties = {"INFERENCE_NUM_THREADS": threads, **options}
        if self._longest_ngram:
            properties["prompt_lookup"] = True
        if draft is not None:
            properties["draft_model"] = openvino_genai.draft_model(str(draft), "CPU", INFERENCE_NUM_THREADS=threads)
        self._pipe = openvino_genai.LLMPipeline(str(model), "CPU", **properties)

    def decode(self, ids: list[int], count: int) -> Decoded:
        """See `Runtime.decode`."""
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        if self._num_drafted:
            config.num_assistant_tokens = self._num_drafted
        if self._longest_ngram:
            config.max_ngram_size = self._longest_ngram
        prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
        result = self._pipe.generate(prompt, config)
        return Decoded([int(token) for token in result.tokens[0]], None)


class OnnxRuntimeGenAi:
    """onnxruntime-genai's generator loop; `model` already names the draft, if there is one (see `prepare.py`)."""

    def __init__(self, model: Path, draft: Path | None, threads: int, options: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        self._num_drafted = options.pop("num_drafted", 0)
        config = onnxruntime_genai.Config(str(model))
        parts = ("decoder", "draft") if self._num_drafted else ("decoder",)
        session = {"intra_op_num_threads": threads, **options}
        overlay: dict[str, Any] = {part: {"session_options": session} for part in parts}
        settings = json.loads((model / "genai_config.json").read_text(encoding="utf-8"))["model"]
        # The end of the text is ignored by waiting for padding instead; `min_length` would forbid the token to all.
        config.overlay(json.dumps({"model": overlay | {"eos_token_id": settings["pad_token_id"]}}))
        self._model = onnxruntime_genai.Model(config)

    def decode(self, ids: list[int], count: int) -> Decoded:
        """See `Runtime.decode`."""
        params = self._genai.GeneratorParams(self._model)
        length = len(ids) + count
        params.set_search_options(max_length=length, do_sample=False)
        if self._num_drafted:
            params.set_speculative_options(max_draft_tokens=self._num_drafted)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        tokens = [int(token) for token in generator.get_sequence(0)][len(ids) :]
        passes = generator.get_speculative_stats()["target_forward_passes"] if self._num_drafted else None
        return Decoded(tokens, passes)


class Mirrorsd:
    """Our own pipeline; `options` names method and device map, and may set `speculation` (else what `tune` found)."""

    def __init__(self, model: Path, draft: Path | None, threads: int, options: dict[str, Any]) -> None:
        from mirrorsd import MirrorPipeline

        self._method = options["method"]
        settings = options.get("speculation")
        self._pipe = MirrorPipeline.load(
            model, device_map=options["device_map"], speculation=settings, use_tuned=settings is None
        )

    def decode(self, ids: list[int], count: int) -> Decoded:
        """See `Runtime.decode`."""
        result = self._pipe.generate(
            token_ids=ids, max_new_tokens=count, ignore_eos=True, temperature=0.0, method=self._method
        )
        return Decoded(list(result.token_ids), result.stats.steps)


RUNTIMES: dict[str, Callable[[Path, Path | None, int, dict[str, Any]], Runtime]] = {
    "openvino-genai": OpenVinoGenAi,
    "onnxruntime-genai": OnnxRuntimeGenAi,
    "mirrorsd": Mirrorsd,
}


def main() -> None:
    """Load, say so, and answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtime", choices=RUNTIMES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--options", default="{}", help="JSON: the runtime's own settings")
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    runtime = RUNTIMES[asked.runtime](asked.model, asked.draft, asked.threads, json.loads(asked.options))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = perf_counter()
        decoded = runtime.decode(request["ids"], request["count"])
        seconds = perf_counter() - started
        if len(decoded.ids) != request["count"]:
            raise SystemExit(f"{asked.runtime} made {len(decoded.ids)} tokens, {request['count']} were asked for")
        print(json.dumps({"ids": decoded.ids, "seconds": seconds, "passes": decoded.passes}), file=answers, flush=True)


if __name__ == "__main__":
    main()
