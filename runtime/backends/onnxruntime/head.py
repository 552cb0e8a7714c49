"""Heads on ONNX Runtime: stages that guess from the hidden states of the target's last pass, on the target's device.

Hidden states are bound where the pass has left them. Only tokens and noise go to the device, and guesses come back.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.devices.onnxruntime.device import OnnxDevice, check_ports, rewritten
from mirrorsd.devices.onnxruntime.masked_graph import PASS_ROWS, reading_rows, rows_spec
from mirrorsd.devices.onnxruntime.own_weights import with_own_weights
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS
from mirrorsd.devices.onnxruntime.stage import OnnxStage, Tensor, run_options
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import head_contract
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import Head, TargetEntry
from mirrorsd.runtime.backends.protocol import HeadGuesses


class OnnxHeads:
    """The heads of a bundle; a stage is opened when its head is first asked for.

    Attributes:
        entries: what the manifest says of each, by kind.
    """

    def __init__(self, bundle: Path, target: TargetEntry, heads: Sequence[Head], *, takes_trees: bool) -> None:
        self.entries: Mapping[str, Head] = {head.kind: head for head in heads}
        self._bundle, self._target, self._takes_trees = bundle, target, takes_trees
        self._stages: dict[str, OnnxStage] = {}
        self._lock = threading.Lock()

    def new(self, kind: str, device: OnnxDevice) -> "OnnxHead":
        """A head with caches of its own.

        Raises:
            BundleError: its stage is damaged, or not what the manifest says.
            DeviceError: the device does not take it, or has no room for its caches.
        """
        entry = self.entries[kind]
        with self._lock:
            if kind not in self._stages:
                path, dtype = self._bundle / entry.file, self._target.shape.dtype
                contract = head_contract(self._target.shape, entry.shape, names.head_name(kind))
                if not self._takes_trees:
                    graph = rewritten(path, with_own_weights)
                else:
                    taps = [names.tap(layer) for layer in entry.shape.taps]
                    graph = rewritten(path, lambda model: reading_rows(with_own_weights(model) or model, taps=taps))
                    contract = replace(contract, inputs=(*contract.inputs, rows_spec()))
                stage = device.open(path, dtype, rewritten=graph)
                check_ports(stage, contract)
                self._stages[kind] = stage
            return OnnxHead(entry, self._stages[kind], device, self._target)


class OnnxHead:
    """One head of one session: its caches, and the run over rows of the session's last pass."""

    def __init__(self, entry: Head, stage: OnnxStage, device: OnnxDevice, target: TargetEntry) -> None:
        shape, place, dtype = entry.shape, device.place, target.shape.dtype
        self.options = run_options(None, has_queue=device.stream is not None)
        self._stage = stage
        self._silence = place.tensor((shape.length, target.shape.vocab_size), "float32")
        self._caches: dict[str, ort.OrtValue] = {}
        size = (1, shape.num_kv_heads, target.capacity, shape.head_dim)
        pairs = ((names.past_key, names.present_key), (names.past_value, names.present_value))
        for layer in range(shape.num_layers):
            for past, present in pairs:
                self._caches[past(layer)] = self._caches[present(layer)] = place.tensor(size, dtype).value

    def run(
        self,
        taps: Mapping[int, Tensor],
        tokens: NDArray[np.int64],
        start: int,
        noise: NDArray[np.float32] | None,
        rows: NDArray[np.int64],
    ) -> HeadGuesses:
        """Guess as `TargetSession.guess` does; `taps` are the pass's own, `[1, S, H]` with `S >= R`.

        Raises:
            DeviceError: the device failed, or its logits are not numbers.
        """
        given = {
            names.HEAD_TOKENS: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tokens[None])),
            names.HEAD_START: ort.OrtValue.ortvalue_from_numpy(np.array([start], dtype=np.int64)),
            PASS_ROWS: ort.OrtValue.ortvalue_from_numpy(rows),
            names.HEAD_NOISE: self._silence.value if noise is None else ort.OrtValue.ortvalue_from_numpy(noise),
            **{names.tap(layer): tensor.value for layer, tensor in taps.items()},
            **self._caches,
        }
        with raised_as(DeviceError, f"ONNX Runtime could not bind a run of {self._stage.name}", ONNX_ERRORS):
            binding = self._stage.session.io_binding()
            for spec in self._stage.session.get_inputs():
                binding.bind_ortvalue_input(spec.name, given[spec.name])
            for spec in self._stage.session.get_outputs():
                if spec.name in self._caches:
                    binding.bind_ortvalue_output(spec.name, self._caches[spec.name])
                else:
                    binding.bind_output(spec.name, "cpu")
        self._stage.run(binding, self.options)
        ids, logprobs = (value.numpy() for value in binding.get_outputs()[:2])
        if not np.isfinite(logprobs[:, 0]).all():
            raise DeviceError(f"The head {self._stage.name} gave log-probabilities that are not numbers.")
        return HeadGuesses(ids, logprobs)
