"""The device that the target's stages run on: each is opened on the provider that was asked for, and nowhere else.

Owns: opening with proof of placement and of the ports, which memory tensors live in, the stream that all stages share,
numbers of captured graphs.
Does not own: running (`stage`), what a provider is told (`providers`).
"""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import onnxruntime as ort

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.device_maps.providers import ON_CUDA, PROVIDERS
from mirrorsd.devices.onnxruntime.device_memory import BestLogits, DeviceMemory
from mirrorsd.devices.onnxruntime.providers import FILE_ERRORS, ONNX_ERRORS, provider_options, session_options
from mirrorsd.devices.onnxruntime.row_reductions import with_shared_rows
from mirrorsd.devices.onnxruntime.stage import OnnxStage, Place
from mirrorsd.graphs.contract import Dim, StageContract
from mirrorsd.graphs.errors import BundleError, DeviceError, MirrorError, raised_as

_TYPE_NAMES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
}
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_NO_GRAPH = ("No graph was found", "does not have a graph")
"""What ONNX Runtime says of a file that is empty, or ends before its graph: by its kind it might be of an option."""
_REDUCES_BY_CUDNN = "CUDAExecutionProvider"
"""The provider whose stages have their reductions rewritten (`row_reductions`)."""
Rewritten = TypeVar("Rewritten")


class OnnxDevice:
    """What all stages on one device share.

    Attributes:
        place: where their tensors live.
        captures: whether passes are captured as graphs and replayed.
        stream: the device's own queue, shared by all segments so that they follow each other without waiting for the
            host; None where the provider has none or keeps its own.
        side_stream: a second one for the exits, which are read while the segment behind them computes.
        best_logits: what finds the best of a row there; None where the host sees all logits.
    """

    def __init__(self, placement: TargetPlacement) -> None:
        """Choose queues, and what finds the best logits there.

        Raises:
            DeviceError: this ONNX Runtime is too old, or the device gives nothing.
        """
        if not hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"):
            raise DeviceError(
                f"ONNX Runtime {ort.__version__} does not tell which device computes what; 1.24 and later do. Install "
                "a later one, or choose another device map (`mirrorsd devices`)."
            )
        self.placement = placement
        self.place: Place = place_of(placement)
        self.captures = self.place.is_device and placement.graphs
        self.stream: Any = _new_stream(placement)
        self.side_stream: Any = None if self.stream is None else _new_stream(placement)
        self._numbers = itertools.count(1)
        handle = None if self.stream is None else self.stream.get_handle()
        self.best_logits = BestLogits(placement, handle) if self.place.is_device else None

    def open(self, path: Path, dtype: str, *, is_exit: bool = False, rewritten: bytes | None = None) -> OnnxStage:
        """Open a stage; an exit goes into the second queue. One that was `rewritten` has its weights beside `path`.

        Raises:
            BundleError: the file is missing or damaged, or its folder's name is none that the runtime reads.
            DeviceError: the provider does not take it, or part of it would run elsewhere.
        """
        _check_name(path)
        if self.placement.provider not in ort.get_available_providers():
            raise DeviceError(
                f"This installation of ONNX Runtime has no {self.placement.provider}, only "
                f"{', '.join(ort.get_available_providers())}. Nothing was run."
            )
        stream = self.side_stream if is_exit else self.stream
        handle = None if stream is None else stream.get_handle()
        options = provider_options(self.placement, dtype=dtype, captures=self.captures, stream=handle)
        settings = session_options(self.placement)
        graph = _graph_for(self.placement.provider, path, rewritten)
        if graph is not None:
            settings.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
        try:
            session = ort.InferenceSession(
                str(path) if graph is None else graph,
                settings,
                providers=[(self.placement.provider, options)],
                enable_fallback=0,
            )
            stage = OnnxStage(session, path, assigned_nodes(session), is_queued=stream is not None)
        except ONNX_ERRORS as error:
            raise _load_error(path, self.placement.provider, error) from error
        check_assignment(path.name, self.placement.provider, session.get_providers()[0], stage.nodes)
        return stage

    def next_graph(self) -> int:
        """A number for a graph to be captured: none twice, since several sessions share a stage."""
        return next(self._numbers)


def place_of(placement: TargetPlacement) -> Place:
    """Where hidden states, caches and logits of a placement live."""
    provider = PROVIDERS[placement.provider]
    if provider.memory == "cpu":
        return Place()
    graphs = None if provider.has_copies else DeviceMemory(placement, provider.memory)
    number = placement.device_id if provider.has_numbers else 0
    return Place(kind=provider.memory, device_id=number, is_device=True, graphs=graphs)


def check_ports(stage: OnnxStage, contract: StageContract) -> None:
    """Refuse a stage whose inputs and outputs are not what its contract makes of the manifest's sizes.

    Raises:
        BundleError: names the first port that differs.
    """
    found = {port.name: port for port in (*stage.session.get_inputs(), *stage.session.get_outputs())}
    specs = {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}
    for name in sorted(found.keys() | specs.keys()):
        port, spec = found.get(name), specs.get(name)
        if port and spec and port.type == _TYPE_NAMES[spec.dtype] and _fits(port.shape, spec.shape):
            continue
        there = f"{port.type} {port.shape}" if port else "nothing"
        expected = f"{_TYPE_NAMES[spec.dtype]} {list(spec.shape)}" if spec else "nothing"
        raise BundleError(
            f"{stage.path} is not the stage {contract.name!r} of the bundle's manifest: as {name!r} it has {there}, "
            f"expected is {expected}. Copy the whole bundle again, or export it again."
        )


def _fits(found: Sequence[int | str | None], expected: Sequence[Dim]) -> bool:
    """Whether fixed dimensions are equal; a symbolic one fits any.

    >>> _fits([1, "s", 64], (1, "S", 64)), _fits([1, "s", 63], (1, "S", 64))
    (True, False)
    """
    return len(found) == len(expected) and all(
        left == right for left, right in zip(found, expected, strict=True) if isinstance(left, int)
    )


def assigned_nodes(session: ort.InferenceSession) -> Counter[tuple[str, str]]:
    """How many nodes of which operator ONNX Runtime gave to which provider: `(provider, operator) -> count`."""
    return Counter(
        (subgraph.ep_name, node.op_type)
        for subgraph in session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
    )


def check_assignment(file: str, asked: str, found: str, nodes: Counter[tuple[str, str]]) -> None:
    """Refuse a stage of which any part would run on another provider than the one asked for.

    Raises:
        DeviceError: names the operators that went elsewhere.
    """
    if found != asked:
        raise DeviceError(
            f"ONNX Runtime put {file} on {found}, the device map asks for {asked}. "
            "Nothing was run. Check the driver, or choose another device map (`mirrorsd devices`)."
        )
    elsewhere = sorted({f"{operator} on {provider}" for provider, operator in nodes if provider != asked})
    if elsewhere:
        raise DeviceError(
            f"{asked} does not take all of {file}: {', '.join(elsewhere)}. Nothing was run, and nothing is moved to "
            "another device silently. Choose another device map (`mirrorsd devices`)."
        )


def _check_name(path: Path) -> None:
    """Refuse a name whose bytes on the disk are others than those of its letters in UTF-8, which the runtimes take."""
    with suppress(UnicodeEncodeError):
        if str(path).encode() == os.fsencode(path):
            return
    name = str(path.parent).encode("ascii", "backslashreplace").decode()
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise BundleError(f"{name} is no name in UTF-8, which ONNX Runtime needs: rename that folder.") from None
    raise BundleError(
        f"Python takes {name} for {sys.getfilesystemencoding()}, and ONNX Runtime for UTF-8, which it is. Start Python "
        "with PYTHONUTF8=1, or in a locale of UTF-8."
    )


def _load_error(path: Path, provider: str, error: Exception) -> MirrorError:
    """A file that is none, or a device that does not take it: with what to do."""
    if isinstance(error, FILE_ERRORS) or any(words in str(error) for words in _NO_GRAPH) or not path.is_file():
        return _file_error(path, error)
    if isinstance(error, MemoryError):
        return DeviceError(
            f"No room for {path.name} on {provider} ({error}). Close other programs, or export with --precision int8 "
            "or a smaller --context (`mirrorsd doctor BUNDLE` counts)."
        )
    return DeviceError(f"ONNX Runtime could not load {path.name} on {provider}: {error}")


def rewritten(path: Path, rewrite: Callable[[bytes], Rewritten]) -> Rewritten:
    """What is made of a stage's file in memory.

    Raises:
        BundleError: the file is missing or damaged.
        NotRewritableError: the stage is whole, and cannot be what is wanted.
    """
    try:
        return rewrite(path.read_bytes())
    except (OSError, ValueError, LookupError) as error:
        raise _file_error(path, error) from error


def _graph_for(provider: str, path: Path, given: bytes | None) -> bytes | None:
    """A stage's graph as this provider computes it best, where that is not what its file holds."""
    if provider != _REDUCES_BY_CUDNN:
        return given
    return rewritten(path, with_shared_rows) if given is None else with_shared_rows(given) or given


def _file_error(path: Path, error: Exception) -> BundleError:
    words = " ".join(str(error).split())  # in a line, whatever the vendor's were
    return BundleError(
        f"{path} is no graph that ONNX Runtime {ort.__version__} can read ({words}). Copy the whole bundle again, or "
        "export it again."
    )


def describe_stages(stages: Sequence[OnnxStage], device: OnnxDevice) -> str:
    """One line: provider, number of nodes on it, and how passes are run."""
    providers = sorted({provider for stage in stages for provider, _ in stage.nodes} or {device.placement.provider})
    num_nodes = sum(sum(stage.nodes.values()) for stage in stages)
    # Some providers list none; no stage opens with a node elsewhere (`disable_cpu_ep_fallback`).
    words = [f"target: onnxruntime {', '.join(providers)} (all {num_nodes or ''} nodes)".replace("  ", " ")]
    words.append(f"{device.placement.threads} thread(s)")
    if device.place.is_device:
        words.append("captured graphs" if device.captures else "no captured graphs")
        words.append("own stream" if device.stream is not None else "the provider's stream")
    return ", ".join(words)


def _new_stream(placement: TargetPlacement) -> Any:
    """A queue of its own on the GPU; None where this ONNX Runtime offers no device object to make one from."""
    if placement.provider not in ON_CUDA:
        return None
    devices = [device for device in ort.get_ep_devices() if device.ep_name == placement.provider]
    if placement.device_id >= len(devices):
        return None
    with raised_as(DeviceError, f"ONNX Runtime made no stream on {placement.provider}", ONNX_ERRORS):
        return devices[placement.device_id].create_sync_stream()
