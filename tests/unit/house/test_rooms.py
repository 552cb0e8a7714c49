"""The rooms of each package: which may know which, how full they are, and who may talk to the vendors."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOST_MODULES = 15
ROOMS: dict[str, dict[str, set[str]]] = {
    "runtime": {
        "sampling": set(),
        "ledger": {"sampling"},
        "turns": set(),
        "backends": {"ledger", "sampling"},
        "policy": {"backends", "ledger", "sampling"},
        "devices": {"backends", "ledger", "turns"},
        "tuned": {"devices", "policy"},
        "draft": {"backends", "ledger", "policy", "sampling"},
        "engine": {"backends", "devices", "policy", "tuned"},
        "decoding": {"backends", "devices", "draft", "engine", "ledger", "policy", "sampling", "turns"},
        "reporting": {"decoding", "ledger", "sampling"},
        "side_by_side": {"reporting"},
        "session": {
            *("decoding", "devices", "draft", "engine"),
            *("backends", "reporting", "sampling", "side_by_side", "turns"),
        },
        "seats": {"backends", "draft", "session", "turns"},
        "loading": {"backends", "devices", "engine", "ledger", "policy", "tuned"},
        "pipeline": {"devices", "engine", "loading", "reporting", "seats", "session", "tuned"},
    },
    "texts": {
        "setting_rules": set(),
        "messages": set(),
        "result_page": set(),
        "finite_pattern": set(),
        "finite_values": set(),
        "followed_words": {"finite_values"},
        "config": {"setting_rules"},
        "finite_schema": {"finite_pattern", "finite_values", "followed_words"},
        "shown_text": {"config"},
        "channels": {"messages", "shown_text"},
        "chat_template": {"channels", "messages"},
        "tokenizer": {"channels", "chat_template", "messages", "setting_rules", "shown_text"},
        "constraint": {"config", "finite_schema", "tokenizer"},
        "speculation": {"config"},
        "request_reader": {"config", "constraint", "messages", "setting_rules", "tokenizer"},
    },
    "devices": {
        "containers": set(),
        "layouts": {"containers"},
        "freed_memory": set(),
        "draft_passes": set(),
        "draft_memory": {"draft_passes"},
        "slot_draft": {"draft_memory", "draft_passes"},
        "cache_bytes": set(),
        "endings": set(),
        "huge_pages": set(),
        "onnxruntime": set(),
        "openvino": {"draft_memory", "draft_passes", "endings", "slot_draft"},
        "hardware": {"openvino"},
        "inventory": {"onnxruntime", "openvino"},
        "fingerprint": {"hardware", "inventory", "layouts"},
        "saved_cache": {"inventory", "layouts"},
    },
    "machine": {
        "npu": set(),
        "doctor": {"npu"},
        "tuning": {"doctor"},
    },
    "export": {
        "weights": set(),
        "pairs": set(),
        "compression_plan": set(),
        "exit_choice": set(),
        "checkpoints": {"weights"},
        "options": {"compression_plan", "weights"},
        "stages": {"checkpoints", "weights"},
        "passes": {"checkpoints", "stages", "weights"},
        "bundle": {"checkpoints", "passes", "stages", "weights"},
        "verify": {"bundle", "checkpoints", "passes", "stages", "weights"},
        "estimate": {"checkpoints", "options", "verify", "weights"},
        "draft_compression": {"compression_plan", "verify"},
        "recompress": {"bundle", "compression_plan", "draft_compression", "verify"},
        "pair_job": {"checkpoints", "exit_choice", "options", "passes", "weights"},
        "integer_choice": {"checkpoints", "pair_job", "passes", "verify", "weights"},
        "pair": {
            *("bundle", "checkpoints", "compression_plan", "draft_compression", "integer_choice", "options"),
            *("pair_job", "passes", "stages", "verify", "weights"),
        },
    },
    "hub": {
        "asking": set(),
        "downloads": {"asking"},
        "archives": set(),
        "checkpoints": {"asking"},
        "repositories": {"asking", "downloads"},
        "links": {"archives", "asking", "downloads"},
        "packing": {"archives", "asking"},
        "listing": {"asking", "packing"},
        "bundles": {"archives", "asking", "links", "repositories"},
    },
    "training": {
        "divergence": set(),
        "models": {"divergence"},
        "plot_style": set(),
        "run": {"plot_style"},
        "text": {"models", "run"},
        "exit_adapter": {"divergence", "run", "text"},
        "target_rows": {"run"},
        "distill_draft": {"divergence", "models", "run", "target_rows", "text"},
        "draft_shape": {"distill_draft", "models"},
        "heads": {"distill_draft", "divergence", "draft_shape", "models", "run", "text"},
        "reports": {"exit_adapter", "models", "plot_style", "text"},
    },
    "server": {
        "settings": set(),
        "errors": set(),
        "metrics": set(),
        "wire": set(),
        "openapi": set(),
        "transport": {"errors", "settings"},
        "bundles": {"errors", "settings"},
        "service": {"bundles", "metrics", "settings"},
        "answers": {"bundles", "errors", "service", "settings", "transport", "wire"},
        "inspection": {"answers", "errors", "metrics", "service", "transport", "wire"},
        "app": {"answers", "errors", "inspection", "openapi", "service", "settings", "transport", "wire"},
        "front": {"errors", "settings", "transport"},
        "running": {"app", "settings", "transport"},
    },
    "cli": {
        "input": set(),
        "output": {"input"},
        "chat": {"input", "output"},
        "bench": {"input", "output"},
        "commands": {"bench", "chat", "input", "output"},
        "application": {"commands", "input", "output"},
        "optimum_command": {"application"},
        "optimum_register": {"optimum_command"},
    },
}
"""Rooms and single files of a package, from the ground up, and what each may import of the same package."""
VENDORS = {"onnxruntime", "openvino"}
KNOW_VENDORS = ("runtime/backends/", "devices/", "machine/")
"""`devices/` looks for devices and opens graphs on them, the runtime talks to a vendor in its backends alone."""


def modules(package: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        inside = path.relative_to(ROOT / package)
        yield path, inside.parts[0].removesuffix(".py")


def imported(path: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == f"mirrorsd.{package}":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"mirrorsd.{package}."):
            yield (node.module or "").split(".")[2]


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_knows_only_those_below_it(package: str) -> None:
    rooms = ROOMS[package]
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path, room in modules(package)
        if not room.startswith("__")
        for other in imported(path, package)
        if other in rooms and other != room and other not in rooms.get(room, set())
    ]
    assert not wrong


@pytest.mark.parametrize("package", ROOMS)
def test_the_arrows_run_down(package: str) -> None:
    """The table itself has no circle: what a room may know stands above it in the table."""
    seen: set[str] = set()
    for room, known in ROOMS[package].items():
        assert known <= seen, (room, known - seen)
        seen.add(room)


@pytest.mark.parametrize("package", ROOMS)
def test_every_module_has_a_room_in_the_table(package: str) -> None:
    found = {room for _, room in modules(package) if not room.startswith("__")}
    assert found == set(ROOMS[package])


def test_no_folder_is_too_full() -> None:
    folders: dict[Path, int] = {}
    for package in (*ROOMS, "bench"):
        for path, _ in modules(package):
            folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): size for folder, size in folders.items() if size > MOST_MODULES} == {}


def test_only_backends_devices_and_machine_know_the_vendors() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for package in ("texts", "devices", "runtime", "machine")
        for path, _ in modules(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and {name.split(".")[0] for name in _names(node)} & VENDORS
        and not path.relative_to(ROOT).as_posix().startswith(KNOW_VENDORS)
    ]
    assert not wrong


def _names(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {node.module or ""} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
