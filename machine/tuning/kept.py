"""`mirrorsd.tune`: tuning on a few texts, told as shares, kept for later loads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.user_cache import check_writable
from mirrorsd.hub.bundles import bundle_folder
from mirrorsd.machine.tuning.search import SECONDS, Advance, Prompt, Silent, find_settings
from mirrorsd.runtime.tuned import Tuned
from mirrorsd.texts.config import CancelToken

Progress = Callable[[str, float], None]
BUILT_IN_TEXTS = (
    "Tell me a story about a little fox.",
    "Tell me a story about an old king and his three sons.",
    "What do bees make?",
    "Good morning! How are you today?",
)


class AsShares(Silent):
    """Tells a callback what share of the present piece of work is done."""

    def __init__(self, on_progress: Progress) -> None:
        self._tell = on_progress

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Advance]:
        num_done = 0

        def advance(_: str) -> None:
            nonlocal num_done
            num_done += 1
            self._tell(title, num_done / total)

        self._tell(title, 0.0)
        yield advance


def tune(
    bundle: str | Path,
    texts: Sequence[Prompt] | None = None,
    *,
    device_map: str = "auto",
    max_new_tokens: int = 64,
    seconds: float = SECONDS,
    cancel: CancelToken | None = None,
    on_progress: Progress | None = None,
) -> Tuned:
    """Find the fastest way to speculate on this machine and keep it for later loads; changes no token.

    Takes memory for the models, and time that it measures: what else runs a bundle should be idle meanwhile.

    Args:
        bundle: a folder, or what else `MirrorPipeline.load` takes.
        texts: prompts or conversations like those that will come; a few built-in ones by default.
        device_map: name of a card, path of a card, or `auto`.
        max_new_tokens: most tokens of a text.
        seconds: what it may take, or a little more; a large model takes longer for the least there is to measure.
        cancel: ends it from any thread; what it has found by then is kept.
        on_progress: told what is being measured, and what share of it is done.

    Raises:
        BundleError, ConfigError, DeviceError: as `MirrorPipeline.load`; or nothing can be kept here.
    """
    if isinstance(texts, str):
        raise ConfigError(f"texts is {texts!r}; expected a list of prompts or conversations.")
    folder = bundle_folder(bundle)
    read_bundle(folder)
    check_writable(folder)
    chosen = _built_in(folder) if texts is None else texts
    listener = AsShares(on_progress) if on_progress else None
    found = find_settings(
        folder,
        chosen,
        device_map=device_map,
        max_new_tokens=max_new_tokens,
        seconds=seconds,
        cancel=cancel,
        listener=listener,
    )
    found.tuned.write(folder)
    return found.tuned


def _built_in(bundle: Path) -> list[Prompt]:
    """The built-in texts, as messages where the bundle has a chat template."""
    if (bundle / names.TOKENIZER_FOLDER / "chat_template.jinja").is_file():
        return [[{"role": "user", "content": text}] for text in BUILT_IN_TEXTS]
    return list(BUILT_IN_TEXTS)
