"""From a card's suppositions, a report of the NPU's compiler and a bundle's sizes to a pace to simulate on."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd.device_maps import DeviceMap, Pace


def estimated_pace(
    card: "DeviceMap", source: Path, longest: int, report: Path | None, target_size: str | None
) -> "Pace":
    """The pace of a pair on a card's machine.

    The rounds are those of the smallest capacity that holds the longest recorded text.

    Args:
        card: It has an [estimate], or nothing can be told.
        source: The bundle, or a recording of it.
        longest: Tokens of the longest text that is replayed.
        report: The compiler's; None for the one in the bundle.
        target_size: GB of a pass, GB of an exit, layers, such as "4.5,0.3,36"; None for the bundle's.

    Raises:
        ConfigError: the card, the report or the sizes are missing.
    """
    if card.estimate is None:
        raise ConfigError(
            f"The card {card.name} has no [pace] and no [estimate] to replay on; name one that has, such as "
            "paced-laptop or lunar-lake."
        )
    path = report or source / names.NPU_FOLDER / card.estimate.npu / names.NPU_REPORT_FILE
    if report is None and not source.is_dir():
        raise ConfigError(
            "A recording holds no report of the NPU's compiler: name one with --npu-report, as mirrorsd compile BUNDLE "
            f"--npu {card.estimate.npu} writes it."
        )
    if not path.is_file():
        raise ConfigError(
            f"There is no report of the NPU's compiler at {path}: run mirrorsd compile BUNDLE --npu "
            f"{card.estimate.npu} first, or name one with --npu-report."
        )
    sizes = _sizes_of(source) if target_size is None else _sizes_in(target_size)
    return card.estimate.pace(*sizes, rounds_in(path, card.estimate.npu, longest))


def with_host_ms(card: "DeviceMap", host_ms: float | None) -> "DeviceMap":
    """The card with another supposition of what the processor takes, if there is one."""
    if card.estimate is None or host_ms is None:
        return card
    return replace(card, estimate=replace(card.estimate, host_ms=host_ms))


def rounds_in(path: Path, platform: str, num_slots: int) -> dict[int, float]:
    """A report's microseconds by rows, of the smallest capacity that holds `num_slots`.

    Raises:
        ConfigError: the report is another platform's, or all shapes were refused.
    """
    from mirrorsd.machine.npu.report import reports_in

    found: dict[int, dict[int, float]] = {}
    for report in reports_in(path):
        if report.platform != platform:
            raise ConfigError(f"{path} is of NPU {report.platform}; the card's is {platform}.")
        sizes = [part for part in report.shape.split("x") if part.isdigit()]
        if report.estimated_us is not None and len(sizes) == 3:
            rows, _, slots = map(int, sizes)
            of_slots = found.setdefault(slots, {})
            of_slots[rows] = max(of_slots.get(rows, 0.0), report.estimated_us)
    fitting = min((slots for slots in found if slots >= num_slots), default=max(found, default=0))
    if not fitting:
        raise ConfigError(f"{path} has no shape with an estimate: the compiler refused them all.")
    return found[fitting]


def _sizes_in(text: str) -> tuple[float, float, int]:
    try:
        of_pass, of_exit, num_layers = text.split(",")
        return float(of_pass), float(of_exit), int(num_layers)
    except ValueError as error:
        raise ConfigError(
            f"--target-size is {text!r}; expected GB of a pass, GB of an exit and layers, such as 4.5,0.3,36."
        ) from error


def _sizes_of(bundle: Path) -> tuple[float, float, int]:
    if not bundle.is_dir():
        raise ConfigError("A recording does not say how large its target is: give --target-size, such as 4.5,0.3,36.")
    manifest = read_bundle(bundle)
    target = manifest.target
    num_bytes = target.read_bytes or manifest.files[target.weights_file].bytes
    share = target.shape.vocab_size * target.shape.hidden_size / target.source.num_parameters
    return num_bytes / 1e9, num_bytes * share / 1e9, target.shape.num_layers
