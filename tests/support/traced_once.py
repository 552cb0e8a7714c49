"""Exports of tiny models in seconds: PyTorch traces each stage once in a run, which takes most of an export's time.

A stage's graph depends on its module and its contract, on all that is in them: the key holds every attribute, the
shape of every tensor, and which tensors are one. The numbers of weights are left out, and rotary tables, of which a
graph only reads rows: a context of another length has the same graph. Where the key is the same, a copy of the first
graph is handed out, to another process, too; numbers are put in afterwards.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from made_once import folder_of_the_run

_AS_EVER: list[Any] = []
LEAST_WEIGHT = 32
"""Numbers of a tensor."""
OF_WHOLE_MODELS = {
    *("architectures", "bos_token_id", "eos_token_id", "initializer_range", "max_position_embeddings"),
    *("num_hidden_layers", "pad_token_id", "tie_word_embeddings", "vocab_size"),
    *("head_rank", "head_tokens", "shares_embedding"),
    "context",
}
"""Fields that no layer reads while it runs, but for a window the context: sizes are in the shapes of weights, too."""
FULL_COLLECTION = 40
"""Collections of younger objects between two of all; with Python's 10 those took 4 % of an export, as graphs stay."""
NUM_LENGTH_TEXTS = 2
"""What a random draft guesses of how many texts is noted in a bundle; each costs 48 windows."""


@pytest.fixture(scope="session", autouse=True)
def traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remembers graphs for as long as the tests run; several folders ask for it, the first one gets it."""
    if _AS_EVER:
        yield
        return
    from mirrorsd.export.passes import torch_to_onnx
    from mirrorsd.export.passes.stamping import digest_of
    from mirrorsd.export.verify import draft_accuracy

    trace, graphs = torch_to_onnx.trace, Graphs(folder_of_the_run(tmp_path_factory))
    _AS_EVER.append(trace)

    def remembered(module: Any, contract: Any) -> Any:
        from torch.onnx import ONNXProgram

        tables, weights = tables_of(module), weights_of(module)
        with without(tables), without_what_no_layer_reads(module):
            key = digest_of(module, contract, without_numbers=weights.values())
        if key is None:
            return trace(module, contract)
        with few_collections(), without_cached_shapes():
            model = graphs.get(key, lambda: trace(module, contract).model)
        put_in(weights | {name: table for name, (_, _, table) in tables.items()}, model.graph)
        return ONNXProgram(model, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_to_onnx, "trace", remembered)
        patch.setattr(draft_accuracy, "NUM_LENGTH_TEXTS", NUM_LENGTH_TEXTS)
        gc.freeze()
        usual = gc.get_threshold()
        gc.set_threshold(*usual[:2], FULL_COLLECTION)
        yield
        gc.set_threshold(*usual)


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that changes how stages compute: no key shows that."""
    monkeypatch.setattr("mirrorsd.export.passes.torch_to_onnx.trace", _AS_EVER[0])


class Graphs:
    """Graphs by key, in this process and in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "traced"
        self._folder.mkdir(exist_ok=True)
        self._here: dict[str, Any] = {}

    def get(self, key: str, make: Any) -> Any:
        """A copy of the graph."""
        import onnx_ir as ir

        if key not in self._here:
            path = self._folder / f"{key}.onnx"
            with FileLock(f"{path}.lock"):
                if path.exists():
                    self._here[key] = ir.load(path)
                else:
                    self._here[key] = make()
                    ir.save(self._here[key], path.with_suffix(".part"))
                    path.with_suffix(".part").replace(path)
        return self._here[key].clone()


@contextmanager
def few_collections() -> Iterator[None]:
    """Look for garbage a fortieth as often: beside all that tests have imported, it takes a seventh of a trace."""
    usual = gc.get_threshold()
    gc.set_threshold(40 * usual[0], *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@contextmanager
def without_cached_shapes() -> Iterator[None]:
    """Have PyTorch compute shapes anew: copies of kept ones, with symbols in them, take a fifth of a trace."""
    import torch._dynamo.config as settings

    with settings.patch(fake_tensor_cache_enabled=False):
        yield


Tables = Mapping[str, tuple[Any, str, Any]]
"""By their names in the whole module: whose they are, what they are called there, and their numbers."""


def tables_of(module: Any) -> Tables:
    """The rotary tables of a stage."""
    owned = ((owner_name, owner, name) for owner_name, owner in module.named_modules() for name in owner._buffers)
    return {
        f"{owner_name}.{name}".lstrip("."): (owner, name, owner._buffers[name])
        for owner_name, owner, name in owned
        if name.startswith(("cos_table", "sin_table"))
    }


@contextmanager
def without(tables: Tables) -> Iterator[None]:
    """Leave one row of each for the time of the block: its width and kind, and how it is scaled."""
    for owner, name, table in tables.values():
        owner._buffers[name] = table[:1].clone()
    try:
        yield
    finally:
        for owner, name, table in tables.values():
            owner._buffers[name] = table


@contextmanager
def without_what_no_layer_reads(module: Any) -> Iterator[None]:
    """Leave out what says something of a whole model, so that layers of several have one graph."""
    parts = [*module.modules()]
    configs = (getattr(part, "config", None) for part in parts)
    owners = {id(config): config for config in configs if hasattr(config, "__dict__")}
    if all(getattr(part, "sliding_window", None) is None for part in parts):
        owners |= {id(part): part for part in parts if hasattr(part, "context")}
    kept = [(vars(owner), {**vars(owner)}) for owner in owners.values()]
    for fields, _ in kept:
        for name in fields.keys() & OF_WHOLE_MODELS:
            fields[name] = None
    try:
        yield
    finally:
        for fields, before in kept:
            fields.update(before)


def weights_of(module: Any) -> dict[str, Any]:
    """Parameters and buffers of a stage by name, without the small ones, which may be numbers that steer it."""
    found = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in found if tensor.numel() >= LEAST_WEIGHT}


def put_in(numbers: Mapping[str, Any], graph: Any) -> None:
    """Give the graph these tensors; those without numbers come from the checkpoint."""
    from onnx_ir.tensor_adapters import TorchTensor

    for name, tensor in numbers.items():
        if name in graph.initializers and not tensor.is_meta:
            value = graph.initializers[name]
            value.const_value = TorchTensor(tensor.detach().contiguous(), name=name)
            value.shape = value.const_value.shape
