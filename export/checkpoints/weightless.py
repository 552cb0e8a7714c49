"""Hugging Face's model of a checkpoint without its weights, and filling in the weights of the part that runs.

Owns: building the model with parameters that take no memory, which stored tensor each of them is, lending numbers to
modules. Does not own: the bytes (`stored_tensors.py`), their stored form (`rounded_weights.py`), stages.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mirrorsd.export.checkpoints.checkpoint import Checkpoint, read_json
from mirrorsd.export.weights.lazy_weight import LazyWeight, stored_weight
from mirrorsd.export.weights.stored_tensors import StoredTensor
from mirrorsd.families.experts import with_separate_experts
from mirrorsd.families.low_rank_head import fit_head
from mirrorsd.families.registry import FAMILIES, built_from, error_words, text_part
from mirrorsd.graphs.errors import ExportError, MirrorError

_OF_TEXT = "language_model."
"""Stands behind the base model's prefix where a model takes images too."""

ReadWeight = Callable[[nn.Module, StoredTensor, torch.dtype], Tensor]


def _as_it_is(module: nn.Module, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    return stored.read(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightlessModel:
    """HF's causal LM; every parameter is NaN, repeated without memory, until it is lent its numbers.

    `stored` says where a parameter's numbers lie, by the id of the parameter; tied ones are one parameter. `read` turns
    them into what a module is lent: the checkpoint's own numbers, or what rounding leaves of them.
    """

    network: Any
    stored: Mapping[int, StoredTensor]
    read: ReadWeight = _as_it_is
    folder: Path | None = None

    def logits(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Run Hugging Face's eager attention over `ids [B, L]`; return `[B, L, V]`. Weights are lent on demand.

        Raises:
            ExportError: the network that config.json describes cannot be run.
        """
        self.network.set_attn_implementation("eager")
        try:
            with torch.no_grad(), self.on_demand():
                found: npt.NDArray[np.float32] = self.network(torch.from_numpy(ids), use_cache=False).logits.numpy()
        except MirrorError:
            raise
        except Exception as error:  # the code is transformers' own: what fails is what its config.json asks for
            raise ExportError(_failure(self.folder, error)) from error
        return found

    def lazy_weights(self, module: nn.Module) -> dict[str, LazyWeight]:
        """Every parameter of `module` that the checkpoint holds, by its name in `module`."""
        return {
            name: stored_weight(self.stored[id(parameter)], parameter.dtype)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in self.stored
        }

    @contextmanager
    def loaded(self, module: nn.Module) -> Iterator[None]:
        """Lend `module` and all modules in it their numbers for the time of the block."""
        lent: dict[tuple[int, type[nn.Module]], nn.Parameter] = {}
        taken = [self._lend(part, lent) for part in module.modules()]
        try:
            yield
        finally:
            for give_back in taken:
                give_back()

    @contextmanager
    def on_demand(self) -> Iterator[None]:
        """Lend each module of the network its own numbers whenever it is called, and only until it returns.

        A convolution's numbers are lent with its parent's, which reads them without calling it. Any other module that
        reads another one's parameters so sees NaN.
        """
        running: dict[nn.Module, list[Callable[[], None]]] = {}

        def before(module: nn.Module, inputs: Any) -> None:
            running[module] = [self._lend(part, {}) for part in (module, *_convolutions(module))]

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            for give_back in running.pop(module):
                give_back()

        owners = [module for module in self.network.modules() if module._parameters or _convolutions(module)]
        hooks = [module.register_forward_pre_hook(before) for module in owners]
        hooks += [module.register_forward_hook(after, always_call=True) for module in owners]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _lend(self, module: nn.Module, lent: dict[tuple[int, type[nn.Module]], nn.Parameter]) -> Callable[[], None]:
        """Fill in the parameters of `module` alone; return what empties them again.

        A tied matrix may have one form as the embedding and another as the head: each kind of module is lent its own.
        """
        empty = {name: p for name, p in module._parameters.items() if p is not None and id(p) in self.stored}
        for name, parameter in empty.items():
            key = (id(parameter), type(module))
            if key not in lent:
                numbers = self.read(module, self.stored[id(parameter)], parameter.dtype)
                lent[key] = nn.Parameter(numbers, requires_grad=False)
            module._parameters[name] = lent[key]
        return lambda: module._parameters.update(empty)


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """Those among a module's own parts."""
    return [child for child in module.children() if isinstance(child, nn.Conv1d)]


def open_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> WeightlessModel:
    """Build the checkpoint's model in `dtype`, ready for inference, without reading any weight.

    Raises:
        ExportError: its config.json describes no network, or weights are missing, of the wrong shape or no floats.
    """
    config = text_part(read_json(checkpoint.folder / "config.json", checkpoint.role))
    with torch.device("meta"):  # nothing takes memory before its sizes are known to be those of the weights
        sketch = _built(config, checkpoint, dtype)
    _untie(sketch, checkpoint)
    _tell_what_is_left(sketch, checkpoint)
    _places(sketch, checkpoint)
    with _parameters_on_meta():
        network = _built(config, checkpoint, dtype)
    _untie(network, checkpoint)
    _without_memory(network)
    return WeightlessModel(network=network.eval(), stored=_places(network, checkpoint), folder=checkpoint.folder)


def _built(config: Mapping[str, Any], checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    try:
        return built_from(config, partial(_network, dtype=dtype))
    except ValueError as error:
        raise ExportError(
            f"the {checkpoint.role} {checkpoint.folder} cannot be built from its config.json: {error}"
        ) from error


def _network(entries: dict[str, Any], dtype: torch.dtype) -> Any:
    config = CONFIG_MAPPING[entries["model_type"]].from_dict(entries)
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return with_separate_experts(fit_head(network))


def _failure(folder: Path | None, error: Exception) -> str:
    """What is wrong with a network that was built and cannot be run: the entry without which it can, if any."""

    def run(entries: dict[str, Any]) -> None:
        with torch.device("meta"), torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.int64)
            network = _network(entries, torch.float32).eval()
            network(ids, attention_mask=torch.zeros(1, 1, 2, 2), position_ids=ids, use_cache=False)

    reason = f"{type(error).__name__}: {error_words(error)}"
    if folder is None:
        return f"the network cannot be run by transformers: {reason}"
    path = folder / "config.json"
    try:
        built_from(text_part(read_json(path, "model")), run)
    except ValueError as found:
        reason = str(found)
    return f"the network that {path} describes cannot be run by transformers: {reason}"


def _untie(network: Any, checkpoint: Checkpoint) -> None:
    """Part parameters that are one by the config, where the checkpoint holds different numbers for them.

    That is what transformers does: a head beside an embedding that it is said to be tied to is the head.
    """
    found = _stored_by_name(network, checkpoint)
    first: dict[int, str] = {}
    for name, parameter in list(network.named_parameters(remove_duplicate=False)):
        other = first.setdefault(id(parameter), name)
        if other == name or not {name, other} <= found.keys() or _are_equal(found[name], found[other]):
            continue
        owner, _, attribute = name.rpartition(".")
        part = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        setattr(network.get_submodule(owner), attribute, part)


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers in float32, read a few rows at a time."""
    if one.shape != other.shape:
        return False
    pairs = zip(one.chunks(torch.float32), other.chunks(torch.float32), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let new modules keep their buffers (rotary frequencies) but move every parameter to the meta device."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _without_memory(network: nn.Module) -> None:
    """Put parameters on the CPU that repeat one NaN: exporting reads shapes only, and a forgotten one shows."""
    replaced: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                repeated = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
                replaced[id(parameter)] = (parameter, nn.Parameter(repeated, requires_grad=False))
            module._parameters[name] = replaced[id(parameter)][1]


def _stored_by_name(network: Any, checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Find every parameter's tensor by its name, with or without the prefix of HF's base model.

    Of several tensors for one parameter the first one in the order of their names counts, as in transformers.
    """
    known = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    found: dict[str, StoredTensor] = {}
    for file_name in sorted(checkpoint.tensors, key=lambda name: name.split(".")):
        name = next((candidate for candidate in _names_of(file_name, network) if candidate in known), None)
        if name is not None:
            found.setdefault(name, checkpoint.tensors[file_name])
    return found


def _names_of(file_name: str, network: Any) -> list[str]:
    """What a tensor of a checkpoint may be called in the network, likeliest first."""
    prefix = f"{network.base_model_prefix}."
    stored_name = FAMILIES[network.config.model_type].name_of(file_name)
    bare = stored_name.removeprefix(prefix)
    nested = bare.removeprefix(_OF_TEXT)
    first, last = [bare] if bare != stored_name else [], [prefix + nested] if nested != bare else []
    return [*first, prefix + stored_name, stored_name, *last]


def _tell_what_is_left(network: Any, checkpoint: Checkpoint) -> None:
    """Warn of weights that belong to the network and have no place in it: nobody reads them, transformers neither.

    Such are a bias of a product that has none by the config, and layers and experts behind the last one. Of what
    belongs to other parts (pictures, heads of its own) nothing is said, as transformers says nothing of what it knows.
    """
    known = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in network.named_buffers()}
    parts = dict(network.named_modules())
    ignored = [re.compile(pattern) for pattern in network._keys_to_ignore_on_load_unexpected or ()]

    def is_surplus(name: str) -> bool:
        steps = name.split(".")
        for place, step in enumerate(steps):
            part = parts.get(".".join(steps[:place]))
            if isinstance(part, nn.ModuleList) and step.isdecimal() and int(step) >= len(part):
                return True
        owner = parts.get(".".join(steps[:-1]))
        return owner is not None and any(own is not None for own in owner._parameters.values())

    surplus = [
        file_name
        for file_name in checkpoint.tensors
        if known.isdisjoint(names := _names_of(file_name, network))
        and any(map(is_surplus, names))
        and not any(pattern.search(name) for pattern in ignored for name in names)
    ]
    if surplus:
        message = (
            f"the {checkpoint.role} {checkpoint.folder} has {len(surplus)} weights that its config.json has no place "
            f"for, and that are not read, for example {min(surplus)!r}: see whether the two belong together"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _places(network: Any, checkpoint: Checkpoint) -> dict[int, StoredTensor]:
    """Which stored tensor each parameter is, by the parameter's id.

    Raises:
        ExportError: one is missing, has another shape or holds no floats.
    """
    found = _stored_by_name(network, checkpoint)
    places: dict[int, StoredTensor] = {}
    shapes: dict[int, tuple[str, torch.Size]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        shapes.setdefault(id(parameter), (name, parameter.shape))
        if name in found:
            places.setdefault(id(parameter), found[name])
    missing = sorted(name for identity, (name, _) in shapes.items() if identity not in places)
    if missing:
        raise ExportError(
            f"the {checkpoint.role} {checkpoint.folder} lacks {len(missing)} weights, for example {missing[0]!r}: "
            "its config.json and its weights do not belong together"
        )
    for identity, (name, shape) in shapes.items():
        places[identity].check_readable()
        if places[identity].shape != tuple(shape):
            raise ExportError(
                f"the {checkpoint.role} {checkpoint.folder} cannot be loaded: {name!r} has shape "
                f"{places[identity].shape}, its config.json asks for {tuple(shape)}"
            )
    return places
