"""Small graphs on a target's own device: they do what ONNX Runtime's Python interface cannot.

`DeviceMemory` reserves (`Expand` of a zero) and copies to the host (`Identity`) where only a graph can. `BestLogits`
finds the best logits of every row on the device that has them, so that a few kilobytes are read instead of a
vocabulary. Does not own: the bytes of a graph (`onnx_bytes`), nor whether the best logits are enough
(`short_rows`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.onnx_bytes import ONNX_TYPES, Port, model, node
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS, adds_exactly, provider_options, session_options
from mirrorsd.graphs.errors import DeviceError, raised_as

_INT64 = ONNX_TYPES["int64"]
_NAMES = {number: name for name, number in ONNX_TYPES.items()}
NUM_BEST = 128
"""Twice as many as the widest top-k of the models' own settings (64); 8 rows of them are 12 KB."""
_LEAST_SAVED = 8
"""A vocabulary that is not so many times larger is read whole."""


class DeviceMemory:
    """What is reserved and read through graphs on one provider."""

    def __init__(self, placement: TargetPlacement, kind: str) -> None:
        self._placement, self._kind = placement, kind

    def zeros(self, shape: tuple[int, ...], dtype: str) -> ort.OrtValue:
        """Reserve a tensor of zeros on the device."""
        kind = ONNX_TYPES[dtype]
        session = _session(
            self._placement, _graph("Expand", [("in", kind, 1), ("shape", _INT64, 1)], ("out", kind, len(shape)))
        )
        binding = session.io_binding()
        binding.bind_cpu_input("in", np.zeros(1, dtype))
        binding.bind_cpu_input("shape", np.array(shape, np.int64))
        binding.bind_output("out", self._kind)
        session.run_with_iobinding(binding)
        reserved: ort.OrtValue = binding.get_outputs()[0]
        return reserved

    def read(self, value: ort.OrtValue) -> NDArray[Any]:
        """Copy a tensor of the device to the host."""
        kind, shape = value.element_type(), value.shape()
        session = _session(self._placement, _graph("Identity", [("in", kind, len(shape))], ("out", kind, len(shape))))
        host = np.empty(shape, _NAMES[kind])
        binding = session.io_binding()
        binding.bind_ortvalue_input("in", value)
        binding.bind_ortvalue_output("out", ort.OrtValue.ortvalue_from_numpy(host))
        session.run_with_iobinding(binding)
        return host


@functools.cache
def integers_are_exact(placement: TargetPlacement) -> bool:
    """Whether this processor adds up products of 8-bit integers without loss, in sessions as targets have them."""
    return adds_exactly(session_options(placement), placement.provider, provider_options(placement))


@functools.cache
def _session(placement: TargetPlacement, graph: bytes) -> ort.InferenceSession:
    """Opened when needed first, never closed: memory that outlived its session would take the process along."""
    providers = [(placement.provider, provider_options(placement))]
    return ort.InferenceSession(graph, session_options(placement), providers=providers, enable_fallback=0)


def _graph(operator: str, inputs: Sequence[Port], output: Port) -> bytes:
    """A model of one operator."""
    return model([node(operator, [name for name, _, _ in inputs], [output[0]])], inputs, [output])


class Best(NamedTuple):
    """The best of rows: `ids` and `logits` `[R, M]`, and `masses [R]`: sums of `exp((logit - best) / temperature)`."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    masses: NDArray[np.float32]


class BestLogits:
    """Finds them on one provider. Opened when a filtered text first asks."""

    def __init__(self, placement: TargetPlacement, stream: int | None = None) -> None:
        self._placement, self._stream = placement, stream
        self._sessions: dict[str, ort.InferenceSession] = {}

    def read(self, logits: ort.OrtValue, dtype: str, temperature: float, num_rows: int) -> Best | None:
        """Those of the first `num_rows` rows of logits `[1, R, V]`; None where the vocabulary is hardly larger.

        Raises:
            DeviceError: the device failed.
        """
        vocab_size = logits.shape()[2]
        if vocab_size < _LEAST_SAVED * NUM_BEST:
            return None
        with raised_as(DeviceError, "ONNX Runtime failed while finding the best logits", ONNX_ERRORS):
            best, ids, masses = self._run(logits, dtype, 1 / temperature)
        return Best(ids[0, :num_rows], best[0, :num_rows], masses[0, :num_rows, 0])

    def _run(
        self, logits: ort.OrtValue, dtype: str, inverse_temperature: float
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        if dtype not in self._sessions:
            options = provider_options(self._placement, dtype=dtype, stream=self._stream)
            self._sessions[dtype] = ort.InferenceSession(
                _best_graph(dtype),
                session_options(self._placement),
                providers=[(self._placement.provider, options)],
                enable_fallback=0,
            )
        num_rows = logits.shape()[1]
        best, ids = (np.empty((1, num_rows, NUM_BEST), kind) for kind in (np.float32, np.int64))
        masses = np.empty((1, num_rows, 1), np.float32)
        binding = self._sessions[dtype].io_binding()
        binding.bind_ortvalue_input("logits", logits)
        binding.bind_cpu_input("inverse_temperature", np.array([inverse_temperature], np.float32))
        for name, array in (("best", best), ("ids", ids), ("masses", masses)):
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        self._sessions[dtype].run_with_iobinding(binding)
        return best, ids, masses


def _best_graph(dtype: str) -> bytes:
    """Top-k, and the mass of each row: `sum(exp((logit - best) / temperature))`, in float32."""
    floats = ONNX_TYPES["float32"]
    nodes = [
        node("Cast", ["logits"], ["floats"], to=floats),
        node("TopK", ["floats", "count"], ["best", "ids"], axis=-1, largest=1, sorted=1),
        node("Gather", ["best", "first"], ["largest"], axis=-1),
        node("Sub", ["floats", "largest"], ["behind"]),
        node("Mul", ["behind", "inverse_temperature"], ["scaled"]),
        node("Exp", ["scaled"], ["weights"]),
        node("ReduceSum", ["weights", "last_axis"], ["masses"], keepdims=1),
    ]
    return model(
        nodes,
        [("logits", ONNX_TYPES[dtype], 3), ("inverse_temperature", floats, 1)],
        [("best", floats, 3), ("ids", ONNX_TYPES["int64"], 3), ("masses", floats, 3)],
        {"count": np.array([NUM_BEST]), "last_axis": np.array([-1]), "first": np.array([0])},
    )
