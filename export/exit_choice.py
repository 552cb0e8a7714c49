"""Where the target is cut: where it was asked for, or by the coverage that was measured of its exits.

Owns: reading shares out of `exit_coverage.json`, and the choice. Does not own: measuring them (`mirrorsd.training`),
nor checks on layers that were asked for (`options.py`).
"""

from collections.abc import Collection, Mapping
from typing import Any

from mirrorsd.export.checkpoints.carried_files import exit_coverage
from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.loading import adapter_layers
from mirrorsd.export.options import ExportOptions, check_exit_layers
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError, ExportError


def exit_layers(target: Checkpoint, options: ExportOptions, feature_layer: int | None) -> tuple[int, ...]:
    """Return the borders of an export; a draft that reads hidden states after `feature_layer` layers needs that one.

    Raises:
        ConfigError: layers that the target does not have, or not the one that the draft reads.
        ExportError: the coverage file cannot be used.
    """
    num_layers = int(target.config["num_hidden_layers"])
    check_exit_layers(options.exit_layers, num_layers)
    if options.exit_layers != "auto":
        if feature_layer is not None and feature_layer not in options.exit_layers:
            raise ConfigError(
                f"the draft reads the target's hidden states after layer {feature_layer}, and the exits asked for are "
                f"after {', '.join(map(str, options.exit_layers))}: ask for that one too, or remove the draft's "
                f"{names.CHANNEL_FILE}, without which it reads ids alone"
            )
        return options.exit_layers
    if feature_layer is not None:
        return (feature_layer,)
    with_adapter, num_candidates = adapter_layers(target.folder, num_layers), options.num_exit_candidates
    coverage = exit_coverage(target)
    return (choose_exit_layer(coverage, num_layers, with_adapter=with_adapter, num_candidates=num_candidates),)


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
