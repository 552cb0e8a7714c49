"""Where the target is cut when nobody says where: from the coverage that was measured of its exits.

Owns: reading shares out of `exit_coverage.json`, and the choice. Does not own: measuring them (`mirrorsd.training`),
nor checks on layers that were asked for (`options.py`).
"""

from collections.abc import Collection, Mapping
from typing import Any

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ExportError


def choose_exit_layer(
    coverage: Mapping[str, Any], num_layers: int, *, with_adapter: Collection[int], num_candidates: int
) -> int:
    """Return the border with the best coverage for the target time that is left to use it in.

    An exit after layer `e` of `N` names the target's choice in a share `c` of rows and leaves `1 - e/N` of the target's
    time to prepare for it; the largest `c * (1 - e/N)` wins, the earlier layer where two are equal. With 6 layers,
    shares of 0.82 after 3 and 0.87 after 4 give 0.41 and 0.29, so 3. Without measurements: half depth.

    >>> shares = {"3": {"untrained": {"8": 0.82}}, "4": {"untrained": {"8": 0.87}}}
    >>> choose_exit_layer({"layers": shares}, 6, with_adapter=(), num_candidates=16)
    3

    Args:
        coverage: Content of `exit_coverage.json`, empty where there is none.
        num_layers: Layers of the target.
        with_adapter: Layers whose adapter will be exported; the others count with their untrained shares.
        num_candidates: Tokens that an exit names; the share of the largest measured number up to it counts.

    Raises:
        ExportError: the file is not about this target, or not of the form that the training writes.
    """
    layers = coverage.get("layers", {})
    if not isinstance(layers, Mapping):
        raise _damaged("'layers' is no object")
    best, best_score = num_layers // 2, 0.0
    for name, kinds in sorted(layers.items(), key=lambda entry: int(entry[0]) if entry[0].isdecimal() else 0):
        if not name.isdecimal() or not 1 <= int(name) < num_layers:
            raise _damaged(f"it has an exit after layer {name}, this target allows 1..{num_layers - 1}")
        kind = "adapter" if int(name) in with_adapter else "untrained"
        share = _share(name, kinds.get(kind) if isinstance(kinds, Mapping) else None, num_candidates)
        score = share * (1 - int(name) / num_layers)
        if score > best_score:
            best, best_score = int(name), score
    return best


def _share(layer: str, shares: Any, num_candidates: int) -> float:
    """The share of the largest measured number of candidates up to `num_candidates`; 0 where all are larger."""
    if not isinstance(shares, Mapping) or not all(isinstance(share, int | float) for share in shares.values()):
        raise _damaged(f"layer {layer} has no shares by number of candidates")
    measured = {int(number): float(share) for number, share in shares.items() if number.isdecimal()}
    return measured[max(fitting)] if (fitting := [n for n in measured if n <= num_candidates]) else 0.0


def _damaged(reason: str) -> ExportError:
    return ExportError(
        f"the target's {names.EXIT_COVERAGE_FILE} cannot be used: {reason}. Measure it again, or name an exit layer"
    )
