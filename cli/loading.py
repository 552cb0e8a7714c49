"""Open a pipeline with the speed options of the command line on top of the device map's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mirrorsd import MirrorPipeline

SpeedOptions = Mapping[str, int | str | None]


def open_pipeline(bundle: Path, device_map: str, speed: SpeedOptions) -> "MirrorPipeline":
    """Load a bundle; an option that is None keeps the device map's value."""
    from mirrorsd import MirrorPipeline

    given = {name: value for name, value in speed.items() if value is not None}
    return MirrorPipeline.load(bundle, device_map=device_map, speculation=given)
