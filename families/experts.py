"""Mixtures of experts: a router gives each row some of many small networks, and their answers are added.

Owns: the experts as one module each, with the names that checkpoints have for their weights, and what their rows go
through while a stage is traced. Does not own: routing, which is Hugging Face's; what becomes of the operator that
stands for one product of all experts (`export/passes/experts.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DOMAIN, PRODUCT, JOINED = "mirrorsd", "ProductByExpert", "joined"
"""The operator that a trace has for the product of sorted rows with the weights of all experts, and its attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How a family names the weights of its experts and routers, and what its config says of them.

    Attributes:
        experts: A part of the name of every expert's weight.
        router: How the name of every router's weight ends.
        num_experts: The config's entry for the experts of a layer.
        num_active: The config's entry for those that a row is given to.
        is_turned: Whether checkpoints hold an expert's matrices as `[K, N]`, gates and ups by turns in one of them.
    """

    experts: str = ".mlp.experts."
    router: str = ".mlp.gate.weight"
    num_experts: str = "num_experts"
    num_active: str = "num_experts_per_tok"
    is_turned: bool = False

    def experts_of(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that an expert's weight has."""
        return [name for name in names if self.experts in name and name.endswith(".weight")]

    def routers_of(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that a router's weight has."""
        return [name for name in names if name.endswith(self.router)]


class Expert(nn.Module):
    """One expert: matrices that a row is multiplied with side by side, and one behind the gate, `down_proj`."""

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        """Build around matrices `[N, K]` by name, the last one `down_proj`, which are not copied."""
        super().__init__()
        for name, matrix in matrices.items():
            self.add_module(name, _linear(matrix))

    @property
    def joined(self) -> tuple[nn.Linear, ...]:
        """The matrices before the gate."""
        linears: list[Any] = list(self.children())
        return tuple(linears[:-1])


class Experts(nn.ModuleList):
    """All experts of a layer, in the place of Hugging Face's module that holds them in two tensors of three axes.

    Checkpoints hold an expert's matrices one by one; so they are read, rounded and written one by one. Biases, where
    there are any, stay two tables `[E, N]`.
    """

    def __init__(self, fused: Any) -> None:
        """Build around the tensors of Hugging Face's module, which are not copied."""
        super().__init__(Expert(matrices) for matrices in _matrices(fused))
        self._gate = _gate_of(fused)
        self.gate_up_proj_bias = getattr(fused, "gate_up_proj_bias", None)
        self.down_proj_bias = getattr(fused, "down_proj_bias", None)

    def forward(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Add up what each row's experts make of it.

        Args:
            rows: `[S, H]`.
            chosen: int64 `[S, k]`, each row's experts.
            shares: `[S, k]`, what their answers are multiplied with.
        """
        if torch.onnx.is_in_onnx_export():
            return self._sorted(rows, chosen, shares)
        total = torch.zeros_like(rows)
        for number in sorted(set(chosen.flatten().tolist())):
            places, slots = torch.where(chosen == number)
            expert: Any = self[number]
            joined = torch.cat([linear(rows[places]) for linear in expert.joined], dim=-1)
            joined = _biased(joined, self.gate_up_proj_bias, torch.full_like(places, number))
            answers = expert.down_proj(self._gate(joined))
            answers = _biased(answers, self.down_proj_bias, torch.full_like(places, number))
            answers = answers * shares[places, slots, None]
            total.index_add_(0, places, answers.to(total.dtype))  # bfloat16 under autocast
        return total

    def _sorted(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The same as a graph has it: pairs of a row and an expert, sorted by expert, are multiplied all at once.

        Pairs of two rows with the experts [7, 2] and [2, 5] are sorted as 1, 2, 3, 0.
        """
        experts: list[Any] = list(self)
        num_active, flat = chosen.shape[1], chosen.reshape(-1)
        places = torch.arange(flat.shape[0])
        order = torch.sort(flat * flat.shape[0] + places).indices
        counts = (flat[:, None] == torch.arange(len(experts))).to(torch.int64).sum(0)
        row_of = torch.onnx.ops.symbolic(
            "Div", (order, torch.tensor(num_active)), dtype=order.dtype, shape=order.shape
        )  # torch's own division of integers becomes eight nodes
        owners = flat.index_select(0, order)
        joined = _product(rows.index_select(0, row_of), counts, [one.joined for one in experts])
        gated = self._gate(_biased(joined, self.gate_up_proj_bias, owners))
        answers = _biased(_product(gated, counts, [(one.down_proj,) for one in experts]), self.down_proj_bias, owners)
        by_row = answers.index_select(0, torch.sort(order).indices).reshape(-1, num_active, rows.shape[1])
        return _summed(by_row * shares[..., None])


def _biased(answers: Tensor, biases: Tensor | None, owners: Tensor) -> Tensor:
    """Add to answers `[P, N]` the biases `[E, N]` of the experts that gave them, `owners` `[P]`."""
    return answers if biases is None else answers + biases.index_select(0, owners)


def _gate_of(fused: Any) -> Any:
    """What stands between the matrices: a method of Hugging Face's module, of a copy that holds none of its tensors."""
    bare = copy(fused)
    bare._parameters = {}
    return bare._apply_gate


def _matrices(fused: Any) -> Iterator[dict[str, Tensor]]:
    """The matrices `[N, K]` of each expert, by the names that they have as modules of their own."""
    for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
        if fused.is_transposed:
            yield {"gate_up_proj": gate_up.T, "down_proj": down.T}
        else:
            gate, up = gate_up.chunk(2)
            yield {"gate_proj": gate, "up_proj": up, "down_proj": down}


def _product(rows: Tensor, counts: Tensor, experts: list[tuple[nn.Linear, ...]]) -> Tensor:
    """Multiply rows `[P, K]`, the first `counts[0]` with the first expert's weights, to `[P, N]` for all of its `N`."""
    weights = [linear.weight for expert in experts for linear in expert]
    width = sum(linear.out_features for linear in experts[0])
    answers: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{PRODUCT}",
        (rows, counts, *weights),
        {JOINED: len(experts[0])},
        dtype=rows.dtype,
        shape=(rows.shape[0], width),
        version=1,
    )
    return answers


def _summed(parts: Tensor) -> Tensor:
    """Add up the parts `[S, k, H]` of each row, one after the other.

    ONNX Runtime's `ReduceSum` adds eight of them in another order where there is one row.
    """
    num_rows, num_parts, width = parts.shape
    given = torch.onnx.ops.symbolic_multi_out(
        "Split",
        (parts,),
        {"axis": 1, "num_outputs": num_parts},
        dtypes=(parts.dtype,) * num_parts,
        shapes=((num_rows, 1, width),) * num_parts,
    )
    total: Tensor = torch.onnx.ops.symbolic("Sum", tuple(given), dtype=parts.dtype, shape=(num_rows, 1, width))
    return total.reshape(num_rows, width)


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


def with_separate_experts(network: Any) -> Any:
    """Put `Experts` into `network` wherever Hugging Face has them in fused tensors; other networks stay as they are."""
    for owner, fused in _fused_in(network):
        owner.experts = Experts(fused)
    return network


@contextmanager
def separate_experts(network: Any) -> Iterator[None]:
    """The same for the time of a block."""
    found = _fused_in(network)
    with_separate_experts(network)
    try:
        yield
    finally:
        for owner, fused in found:
            owner.experts = fused


@contextmanager
def watched_routers(layers: Iterable[nn.Module], near: float) -> Iterator[dict[int, Tensor]]:
    """Note where a router's last chosen expert is hardly likelier than the next one.

    Args:
        layers: Of a network that runs in the block, once.
        near: How close two logits are then, in standard deviations of a row's logits.

    Yields:
        By layer, which rows `[S]` these are; filled while the network runs.
    """
    found: dict[int, Tensor] = {}

    def note(layer: int, given: tuple[Tensor, ...]) -> None:
        logits, shares = given[:2]
        num_active = shares.shape[-1]
        if num_active < logits.shape[-1]:  # else every expert is chosen
            best = torch.topk(logits, num_active + 1).values
            found[layer] = best[:, -2] - best[:, -1] < near * logits.std(-1)

    mixtures: list[tuple[int, Any]] = [
        (layer, module)
        for layer, whole in enumerate(layers)
        for module in whole.modules()
        if isinstance(getattr(module, "experts", None), Experts)
    ]
    hooks = [
        _router_of(mixture).register_forward_hook(lambda _, __, given, layer=layer: note(layer, given))
        for layer, mixture in mixtures
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _router_of(mixture: Any) -> Any:
    return mixture.router if hasattr(mixture, "router") else mixture.gate


def _fused_in(network: Any) -> list[tuple[Any, Any]]:
    return [(module, child) for module in network.modules() for child in module.children() if _is_fused(child)]


def _is_fused(module: nn.Module) -> bool:
    return {"gate_up_proj", "down_proj"} <= module._parameters.keys()
