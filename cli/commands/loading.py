"""Open a pipeline with the speed options of the command line on top of the device map's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mirrorsd.cli.input.requests import Request
from mirrorsd.cli.output.console import note, show_loading
from mirrorsd.device_maps import builtin_names
from mirrorsd.graphs import names
from mirrorsd.graphs.documents import DocumentError, read_text
from mirrorsd.graphs.manifest_values import read_manifest

if TYPE_CHECKING:
    from mirrorsd import MirrorPipeline

SpeedOptions = Mapping[str, object]
UNTRIED = (
    "note: auto picks {} here, a device map that was never tried on such a machine; "
    "`mirrorsd doctor BUNDLE` tries it, --device-map cpu avoids it"
)


def open_pipeline(
    bundle: Path, device_map: str, speed: SpeedOptions, layout: str | None = None, *, is_verbose: bool = False
) -> "MirrorPipeline":
    """Load a bundle; what `speed` does not name keeps the device map's value.

    Says so where `auto` has picked a card that nobody has tried yet.
    """
    from mirrorsd import MirrorPipeline

    with show_loading(f"loading {bundle.name}") as show:
        pipe = MirrorPipeline.load(bundle, device_map=device_map, speculation=speed, layout=layout, on_progress=show)
    if device_map == "auto" and not pipe.device_map.tried:
        note(UNTRIED.format(pipe.device_map.name), "yellow")
    if is_verbose:
        note_placement(pipe)
    return pipe


def fetched(reference: Path) -> Path:
    """The folder of a bundle reference; what has to be fetched for it is shown.

    Raises:
        BundleError, ConfigError: see `bundle_folder`.
    """
    from mirrorsd.hub.bundles import bundle_folder

    with show_loading("looking for the bundle") as show:
        return bundle_folder(reference, show)


def check_fits(bundle: Path, request: Request) -> None:
    """Refuse a prompt that is longer than the context before the models are loaded.

    A text of fewer characters than the context has tokens is not even counted; what is wrong with a bundle is for
    loading to say.

    Raises:
        ContextLengthError: it is longer.
    """
    path = bundle / names.MANIFEST_FILE
    if not path.is_file():
        return
    try:
        target = read_manifest(read_text(path), origin=str(path)).target
    except DocumentError:
        return
    context = target.context
    written = [request.prompt or "", *(str(message.get("content")) for message in request.messages or ())]
    if sum(map(len, written)) <= context:
        return
    from mirrorsd.runtime.decoding.request import check_prompt_fits
    from mirrorsd.texts.tokenizer import BundleTokenizer

    tokenizer = BundleTokenizer(bundle, target.shape.vocab_size)
    if request.messages is not None:
        check_prompt_fits(len(tokenizer.encode_chat(request.messages)), context)
    elif request.prompt is not None:
        check_prompt_fits(len(tokenizer.encode(request.prompt)), context)


def note_placement(pipe: "MirrorPipeline") -> None:
    """Say which device map is in use and what runs where; `mirrorsd devices` says why the other maps do not fit."""
    others = set(builtin_names()) - {pipe.device_map.name}
    for line in pipe.placement:
        if line.split(":", 1)[0] not in others:
            note(line)
