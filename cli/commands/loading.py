"""Open a pipeline with the speed options of the command line on top of the device map's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.cli.input.requests import Messages, Request, as_asked, has_chat_template
from mirrorsd.cli.output.console import note, show_loading
from mirrorsd.device_maps import builtin_names
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.documents import DocumentError, read_text
from mirrorsd.graphs.errors import ContextLengthError
from mirrorsd.graphs.manifest_values import read_manifest

if TYPE_CHECKING:
    from mirrorsd import MirrorPipeline
    from mirrorsd.texts.tokenizer import BundleTokenizer

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

    check_prompt_fits(_num_tokens(BundleTokenizer(bundle, target.shape.vocab_size), request), context)


def first_turns(bundle: Path, questions: Sequence[Question]) -> list[str | Messages]:
    """The questions' first turns as `compare` asks them: through the chat template, if the bundle has one.

    What leaves no room in the context for a token and a window is left out, which is said.

    Raises:
        BundleError: it is no bundle, or a damaged one.
        ContextLengthError: nothing leaves room.
    """
    from mirrorsd.texts.tokenizer import BundleTokenizer

    target, is_chat = read_bundle(bundle).target, has_chat_template(bundle)
    tokenizer = BundleTokenizer(bundle, target.shape.vocab_size)
    asked = [as_asked(question.turns[0], is_chat=is_chat) for question in questions]
    kept = [request for request in asked if _num_tokens(tokenizer, request) < target.context - 1]
    if not kept:
        raise ContextLengthError(
            f"No question fits into the bundle's context of {target.context} tokens; export it with more --context."
        )
    if len(kept) < len(asked):
        note(
            f"{len(asked) - len(kept)} of {len(asked)} questions do not fit into the context of {target.context} "
            "tokens, and are left out"
        )
    return [request.messages or request.prompt or "" for request in kept]


def _num_tokens(tokenizer: "BundleTokenizer", request: Request) -> int:
    """How many tokens the model reads of a request."""
    if request.messages is not None:
        return len(tokenizer.encode_chat(request.messages))
    return len(tokenizer.encode(request.prompt or ""))


def note_placement(pipe: "MirrorPipeline") -> None:
    """Say which device map is in use and what runs where; `mirrorsd devices` says why the other maps do not fit."""
    others = set(builtin_names()) - {pipe.device_map.name}
    for line in pipe.placement:
        if line.split(":", 1)[0] not in others:
            note(line)
