"""The target on ONNX Runtime (CPU, CUDA and other providers). Vendor calls live here and nowhere else.

Hidden states, caches and logits stay on the device between the stages; ids and top candidates are the only things that
travel. One I/O binding per number of rows is made once and reused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import Exit, Segment, TargetEntry
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.onnx_providers import provider_options, session_options
from mirrorsd.runtime.target_session import ExitGuesses, TargetOutput

_NEAR_TIE_GAPS = {"float32": 1e-3, "float16": 5e-2}
_MAX_BOUND_PASSES = 64
_VENDOR_ERRORS = (RuntimeError, ort.capi.onnxruntime_pybind11_state.Fail)


class OnnxTargetModel:
    """The target's graphs, loaded once. Load it on the target worker's thread."""

    def __init__(self, bundle: Path, entry: TargetEntry, placement: TargetPlacement) -> None:
        self.entry, self.placement = entry, placement
        options = session_options(placement)
        self.segments = [(s, _open(bundle / s.file, placement, options)) for s in entry.segments]
        self.exits = {e.layer: (e, _open(bundle / e.file, placement, options)) for e in entry.exits}

    def new_session(self) -> "OnnxTarget":
        """A session with a cache of its own on the shared graphs."""
        return OnnxTarget(self)

    def describe(self) -> str:
        """One line for `pipe.placement`, with the providers that the graphs really use."""
        providers = sorted({session.get_providers()[0] for _, session in self.segments})
        return f"target: onnxruntime {', '.join(providers)}, {self.placement.threads} thread(s)"


class OnnxTarget:
    """A `TargetSession` on an ONNX Runtime provider: one cache, and the bindings to it."""

    def __init__(self, model: OnnxTargetModel) -> None:
        entry = model.entry
        self.context = entry.context
        self.vocab_size = entry.shape.vocab_size
        self.near_tie_gap = _NEAR_TIE_GAPS.get(entry.shape.dtype, 5e-2)
        self._model = model
        self._cache = _make_cache(entry, model.placement)
        self._passes: dict[tuple[int, bool], _BoundPass] = {}

    def run(
        self,
        tokens: NDArray[np.int64],
        start: int,
        *,
        with_logits: bool,
        ledger: Ledger,
        on_exit: Callable[[ExitGuesses], None] | None = None,
    ) -> TargetOutput:
        """See `TargetSession.run`."""
        bound = self._bound(len(tokens), is_prefill=False)
        bound.write(tokens, start)
        for segment in bound.segments:
            with ledger.time("target", segment.name):
                segment.run()
            exit_point = bound.exits.get(segment.end_layer)
            if on_exit is not None and exit_point is not None:
                with ledger.time("target", "exit"):
                    exit_point.run()
                on_exit(ExitGuesses(segment.end_layer, *exit_point.read()))
        with ledger.time("target", "read"):
            return bound.read(with_logits)

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        """See `TargetSession.prefill`."""
        bound = self._bound(len(tokens), is_prefill=True)
        bound.write(tokens, start)
        with ledger.time("target", "prefill"):
            for segment in bound.segments:
                segment.run()

    def warm_up(self, num_rows: int) -> None:
        """Run once with 1 and with `num_rows` rows, so that the first request pays nothing."""
        for size in {1, num_rows}:
            self.run(np.zeros(size, dtype=np.int64), 0, with_logits=False, ledger=Ledger(), on_exit=lambda _: None)

    def close(self) -> None:
        """Drop bindings and cache."""
        self._passes.clear()
        self._cache.clear()

    def _bound(self, num_rows: int, *, is_prefill: bool) -> "_BoundPass":
        key = (num_rows, is_prefill)
        if key not in self._passes:
            if len(self._passes) >= _MAX_BOUND_PASSES:
                self._passes.pop(next(iter(self._passes)))
            self._passes[key] = _BoundPass(self._model, self._cache, num_rows, logit_rows=1 if is_prefill else num_rows)
        return self._passes[key]


class _BoundPass:
    """All stages bound for one number of rows."""

    def __init__(
        self, model: OnnxTargetModel, cache: dict[str, ort.OrtValue], num_rows: int, *, logit_rows: int
    ) -> None:
        shape, placement = model.entry.shape, model.placement
        self._ids = np.zeros((1, num_rows), dtype=np.int64)
        self._seqlens_k = np.zeros(1, dtype=np.int32)
        self._total_length = np.zeros((), dtype=np.int32)
        rows = np.arange(num_rows - logit_rows, num_rows, dtype=np.int64)
        self._argmax_ids = np.zeros((1, logit_rows), dtype=np.int64)
        self._argmax_gap = np.zeros((1, logit_rows), dtype=np.float32)
        self._logits = _Buffer((1, logit_rows, shape.vocab_size), shape.dtype, placement)
        values = {
            names.INPUT_IDS: _shared(self._ids),
            names.SEQLENS_K: _shared(self._seqlens_k),
            names.TOTAL_LENGTH: _shared(self._total_length),
            names.LOGIT_ROWS: _shared(rows),
            names.LOGITS: self._logits.value,
            names.ARGMAX_IDS: _shared(self._argmax_ids),
            names.ARGMAX_GAP: _shared(self._argmax_gap),
            **cache,
        }
        self.segments: list[_BoundSegment] = []
        self.exits: dict[int, _BoundExit] = {}
        hidden_in: ort.OrtValue | None = None
        for segment, session in model.segments:
            hidden_out = _Buffer((1, num_rows, shape.hidden_size), shape.dtype, placement).value
            self.segments.append(_BoundSegment(segment, session, values, hidden_in, hidden_out))
            hidden_in = hidden_out
            if segment.end_layer in model.exits:
                self.exits[segment.end_layer] = _BoundExit(*model.exits[segment.end_layer], num_rows, hidden_out)

    def write(self, tokens: NDArray[np.int64], start: int) -> None:
        """Set this pass's rows and how many cache rows there are after it."""
        self._ids[0] = tokens
        total = start + len(tokens)
        self._seqlens_k[0] = total - 1
        self._total_length[()] = total

    def read(self, with_logits: bool) -> TargetOutput:
        logits = self._logits.read()[0] if with_logits else None
        return TargetOutput(self._argmax_ids[0], self._argmax_gap[0], logits)


class _BoundSegment:
    """One segment's session with everything bound."""

    def __init__(
        self,
        segment: Segment,
        session: ort.InferenceSession,
        values: dict[str, ort.OrtValue],
        hidden_in: ort.OrtValue | None,
        hidden_out: ort.OrtValue,
    ) -> None:
        self.name, self.end_layer = segment.name, segment.end_layer
        self._session = session
        self._binding = session.io_binding()
        for spec in session.get_inputs():
            value = hidden_in if spec.name == names.HIDDEN else values[spec.name]
            self._binding.bind_ortvalue_input(spec.name, value)
        for spec in session.get_outputs():
            value = hidden_out if spec.name in (names.HIDDEN, names.NEXT_HIDDEN) else values[spec.name]
            self._binding.bind_ortvalue_output(spec.name, value)

    def run(self) -> None:
        _run_bound(self._session, self._binding, self.name)


class _BoundExit:
    """One exit's session with everything bound; its candidates land in host memory."""

    def __init__(self, entry: Exit, session: ort.InferenceSession, num_rows: int, hidden: ort.OrtValue) -> None:
        self._name, self._session = entry.name, session
        self._ids = np.zeros((1, num_rows, entry.num_candidates), dtype=np.int64)
        self._logprobs = np.zeros((1, num_rows, entry.num_candidates), dtype=np.float32)
        self._binding = session.io_binding()
        self._binding.bind_ortvalue_input(names.HIDDEN, hidden)
        self._binding.bind_ortvalue_output(names.EXIT_IDS, _shared(self._ids))
        self._binding.bind_ortvalue_output(names.EXIT_LOGPROBS, _shared(self._logprobs))

    def run(self) -> None:
        _run_bound(self._session, self._binding, self._name)

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Copies of ids and log-probabilities: the draft worker reads them while the next pass may be running."""
        return self._ids[0].copy(), self._logprobs[0].copy()


class _Buffer:
    """A tensor on the target's device; on the CPU the host sees the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: str, placement: TargetPlacement) -> None:
        self._host: NDArray[np.floating] | None = None
        if placement.provider == "CUDAExecutionProvider":
            self.value = ort.OrtValue.ortvalue_from_shape_and_type(
                list(shape), np.dtype(dtype), "cuda", placement.device_id
            )
        else:
            self._host = np.zeros(shape, dtype=dtype)
            self.value = _shared(self._host)

    def read(self) -> NDArray[np.floating]:
        """The contents on the host: a view on the CPU, a copy from a device."""
        return self._host if self._host is not None else self.value.numpy()


def _shared(array: NDArray[Any]) -> ort.OrtValue:
    """An OrtValue over the array's own memory."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def _make_cache(entry: TargetEntry, placement: TargetPlacement) -> dict[str, ort.OrtValue]:
    """Share-buffer caches: `past_*` and `present_*` of a layer are one value of capacity `context`."""
    shape = (1, entry.shape.num_kv_heads, entry.context, entry.shape.head_dim)
    cache: dict[str, ort.OrtValue] = {}
    for layer in range(entry.shape.num_layers):
        key, value = (_Buffer(shape, entry.shape.dtype, placement).value for _ in range(2))
        cache[names.past_key(layer)] = cache[names.present_key(layer)] = key
        cache[names.past_value(layer)] = cache[names.present_value(layer)] = value
    return cache


def _open(path: Path, placement: TargetPlacement, options: ort.SessionOptions) -> ort.InferenceSession:
    provider = (placement.provider, provider_options(placement))
    try:
        session = ort.InferenceSession(str(path), options, providers=[provider], enable_fallback=0)
    except _VENDOR_ERRORS as error:
        raise DeviceError(f"ONNX Runtime could not load {path.name} on {placement.provider}: {error}") from error
    found = session.get_providers()[0]
    if found != placement.provider:
        raise DeviceError(
            f"ONNX Runtime put {path.name} on {found}, the device map asks for {placement.provider}. "
            "Nothing was run. Check the driver, or choose another device map (`mirrorsd devices`)."
        )
    return session


def _run_bound(session: ort.InferenceSession, binding: ort.IOBinding, name: str) -> None:
    try:
        session.run_with_iobinding(binding)
    except _VENDOR_ERRORS as error:
        raise DeviceError(f"ONNX Runtime failed while running the target's {name}: {error}") from error
