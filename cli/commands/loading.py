"""Open a pipeline with the speed options of the command line on top of the device map's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mirrorsd.cli.output.console import note
from mirrorsd.device_maps import builtin_names

if TYPE_CHECKING:
    from mirrorsd import MirrorPipeline

SpeedOptions = Mapping[str, object]


def open_pipeline(bundle: Path, device_map: str, speed: SpeedOptions, layout: str | None = None) -> "MirrorPipeline":
    """Load a bundle; an option that is None keeps the device map's value."""
    from mirrorsd import MirrorPipeline

    given = {name: value for name, value in speed.items() if value is not None}
    return MirrorPipeline.load(bundle, device_map=device_map, speculation=given, layout=layout)


def note_placement(pipe: "MirrorPipeline") -> None:
    """Say which device map is in use and what runs where; `mirrorsd devices` says why the other maps do not fit."""
    others = set(builtin_names()) - {pipe.device_map.name}
    for line in pipe.placement:
        if line.split(":", 1)[0] not in others:
            note(line)
