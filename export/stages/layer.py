"""One layer of a stage by itself: what it takes from the stage, what it gives, and the node in its place.

Owns: its contract, made from the stage's; that it is a node while its stage is traced. Does not own: what the layer is
(`target.py`, `draft.py`), putting its graph in the node's place (`passes/stamping.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mirrorsd.graphs import names
from mirrorsd.graphs.contract import Dim, StageContract, TensorSpec

Named = TypeVar("Named")

DOMAIN, NAME = "mirrorsd.export", "name"
"""Of the node in a layer's place: where its operator is from, and the attribute that says whose it is."""

ANY = 0
"""The number in the names of what is a layer's own, in its contract: layers that are alike have the same one."""

_POSITIONS, _COS, _SIN = "positions", "cos", "sin"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a stage.

    Attributes:
        module: takes and gives the tensors of `contract`, in its order.
        contract: has the same names for all layers that are alike.
        name: how the layer's weights begin in the stage: "layers.3."
    """

    module: nn.Module
    contract: StageContract
    name: str

    def __call__(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the layer over the inputs that its contract names; while a stage is traced, put a node in its place."""
        inputs = tuple(given[spec.name] for spec in self.contract.inputs)
        found = self._node(inputs) if torch.onnx.is_in_onnx_export() else self.module(*inputs)
        return {spec.name: tensor for spec, tensor in zip(self.contract.outputs, found, strict=True)}

    def _node(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sizes: dict[Dim, Any] = {}
        for spec, tensor in zip(self.contract.inputs, inputs, strict=True):
            sizes = dict(zip(spec.shape, tensor.shape, strict=True)) | sizes  # hidden states, which come first, decide
        found = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::Layer",
            inputs,
            {NAME: self.name},
            dtypes=[getattr(torch, spec.dtype) for spec in self.contract.outputs],
            shapes=[[sizes.get(dim, dim) for dim in spec.shape] for spec in self.contract.outputs],
            version=1,
        )
        return tuple(found)


def layer_contract(
    stage: StageContract, number: int, rows: str, hidden_size: int, rotated: int, more: tuple[TensorSpec, ...]
) -> StageContract:
    """Contract of layer `number` of a stage; layers that are alike have the same.

    Args:
        stage: Its contract, which has the layer's caches.
        number: Absolute layer number.
        rows: What the number of rows is called.
        hidden_size: Width of a row.
        rotated: Width of the rotary tables, 0 for none.
        more: Further inputs.
    """
    taken, given = (
        [replace(spec, name=name) for name, spec in of_layer({spec.name: spec for spec in specs}, number).items()]
        for specs in (stage.inputs, stage.outputs)
    )
    dtype = taken[0].dtype
    hidden = TensorSpec(name=names.HIDDEN, dtype=dtype, shape=(1, rows, hidden_size))
    angles = [TensorSpec(name=name, dtype=dtype, shape=(1, rows, rotated)) for name in (_COS, _SIN) if rotated]
    positions = TensorSpec(name=_POSITIONS, dtype="int64", shape=(1, rows))
    inputs = (hidden, positions, *angles, *more, *taken)
    return StageContract(name="layer", inputs=inputs, outputs=(replace(hidden, name=names.NEXT_HIDDEN), *given))


def of_layer(by_name: Mapping[str, Named], number: int) -> dict[str, Named]:
    """What a stage has for one layer alone, by its names in the layer's contract; what heads tap is the stage's own."""
    return _renumbered({name: it for name, it in by_name.items() if name != names.tap(number)}, number, ANY)


def of_stage(by_name: Mapping[str, Named], number: int) -> dict[str, Named]:
    """The other way round."""
    return _renumbered(by_name, ANY, number)


def _renumbered(by_name: Mapping[str, Named], old: int, new: int) -> dict[str, Named]:
    parts = ((*name.rpartition(".")[::2], it) for name, it in by_name.items())
    return {f"{name}.{new}": it for name, number, it in parts if number == str(old)}


def flowing_inputs(hidden: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """What every layer is given, by its names in the layer's contract."""
    return {names.HIDDEN: hidden, _POSITIONS: positions, **dict(zip((_COS, _SIN), angles or (), strict=False))}


def layer_inputs(given: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same as the arguments of HF's layers."""
    angles = (given[_COS], given[_SIN]) if _COS in given else None
    return {"hidden_states": given[names.HIDDEN], "position_embeddings": angles, "position_ids": given[_POSITIONS]}
