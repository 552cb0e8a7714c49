"""Models of today that cannot be had here: what transformers' own configs say of their sizes, and what the page says.

MIRRORSD_WRITE_PAGES=1 python -m pytest tests/unit/families/test_sizes_on_paper.py    writes the table again
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mirrorsd.export.checkpoints.loading import target_shape
from mirrorsd.export.estimate import estimate_sizes, stored_bytes
from mirrorsd.export.options import ExportOptions
from mirrorsd.families.registry import FAMILIES
from mirrorsd.graphs.contract import MOST_STATES
from mirrorsd.hub.asking import readable_bytes

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- sizes -->", "<!-- end of sizes -->"
HEADER = (
    "| model | parameters, active | int8: disk, memory to export | int4 | cache of 2,048 tokens, states |",
    "|---|---|---|---|---|",
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-9B": ("qwen3_5_text", {}),
    "Qwen3.6-35B-A3B": ("qwen3_5_moe_text", {}),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
}
"""Families, and what the published config.json says beyond transformers' defaults."""
CONTEXT, DRAFT = 2048, 400_000_000


def network_of(name: str) -> Any:
    family, entries = MODELS[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**entries))  # type: ignore[no-untyped-call]


def active_share(network: Any) -> int:
    """Parameters that a token goes through, the whole embedding among them, which names sometimes leave out."""
    mixture = FAMILIES[network.config.model_type].mixture
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    if mixture is None:
        return sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if mixture.experts in name)
    share = getattr(network.config, mixture.num_active) / getattr(network.config, mixture.num_experts)
    return round(sum(sizes.values()) - experts + experts * share)


def row_of(name: str) -> str:
    network = network_of(name)
    total = sum(parameter.numel() for parameter in network.parameters())
    cells = []
    for precision in ("int8", "int4"):
        disk = stored_bytes(total, precision)
        has_integers = precision == "int8" and FAMILIES[network.config.model_type].mixture is None
        options = ExportOptions(precision=precision)
        export = estimate_sizes(total, DRAFT, options, has_integers=has_integers).memory_bytes
        cells.append(", ".join(readable_bytes(round(size)) for size in (disk, export)))
    shape = target_shape(network, "int8")
    rows = 2 * len(shape.attention_layers) * shape.num_kv_heads * shape.head_dim * CONTEXT * shape.bytes_per_number
    states = f", {readable_bytes(MOST_STATES * shape.state_bytes)}" if shape.state_bytes else ", none"
    parameters = f"{total / 1e9:.1f}, {active_share(network) / 1e9:.1f} billion"
    return f"| {name} | {parameters} | {cells[0]} | {cells[1]} | {readable_bytes(rows)}{states} |"


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("Qwen3.6-35B-A3B", 35, 3.5), ("Qwen3-Next-80B-A3B", 80, 3.9), ("gpt-oss-20b", 20.9, 4.2), ("Qwen3.5-9B", 9, 9)],
)
def test_configs_give_the_sizes_that_the_names_say(name: str, total: float, active: float) -> None:
    network = network_of(name)
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e9 == pytest.approx(total, rel=0.06)
    assert active_share(network) / 1e9 == pytest.approx(active, rel=0.05)


def test_the_page_says_what_the_configs_say() -> None:
    rows = [row_of(name) for name in MODELS]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = slice(lines.index(BEGIN) + 1, lines.index(END))
    if os.environ.get("MIRRORSD_WRITE_PAGES"):
        lines[table] = [*HEADER, *rows]
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
        table = slice(table.start, table.start + len(rows) + len(HEADER))
    assert lines[table] == [*HEADER, *rows]
