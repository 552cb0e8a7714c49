"""What is carried over from the checkpoints as it is: tokenizer, chat template, licences, generation defaults.

Owns: which files travel and where to. Does not own: reading them at run time.
"""

import math
import shutil
from pathlib import Path
from typing import Any

from mirrorsd.export.checkpoints.checkpoint import Checkpoint, read_json
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import TokenEntry

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_LICENCE_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*", "README.md", "USE_POLICY*")
_GENERATION_DEFAULTS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


def copy_tokenizer(target: Checkpoint, bundle: Path) -> None:
    """Copy the tokenizer; a chat template kept inside tokenizer_config.json is written out as a file too.

    Raises:
        ExportError: tokenizer_config.json is not valid JSON.
    """
    folder = bundle / names.TOKENIZER_FOLDER
    folder.mkdir(exist_ok=True)
    for name in _TOKENIZER_FILES:
        if (target.folder / name).is_file():
            shutil.copyfile(target.folder / name, folder / name)
    template = _chat_template(target)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def _chat_template(target: Checkpoint) -> str | None:
    """The template file, else the "default" (or only) one of tokenizer_config.json."""
    path = target.folder / "chat_template.jinja"
    if path.is_file():
        return path.read_bytes().decode("utf-8")
    if not (target.folder / "tokenizer_config.json").is_file():
        return None
    given = read_json(target.folder / "tokenizer_config.json", target.role).get("chat_template")
    if not isinstance(given, list):
        return given if isinstance(given, str) else None
    by_name: dict[str, str] = {entry["name"]: entry["template"] for entry in given}
    return by_name.get("default", next(iter(by_name.values()), None))


def copy_licences(checkpoint: Checkpoint, bundle: Path) -> None:
    """Copy licence texts and the model card into `licences/target` or `licences/draft`."""
    found = [path for pattern in _LICENCE_PATTERNS for path in sorted(checkpoint.folder.glob(pattern))]
    if not found:
        return
    folder = bundle / "licences" / checkpoint.role
    folder.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copyfile(path, folder / path.name)


def token_entry(target: Checkpoint) -> TokenEntry:
    """Special token ids of the target; one that its vocabulary does not have (-1 for none) is left out."""
    known = range(int(target.config["vocab_size"]))
    bos_id, pad_id = (target.token_id(name) for name in ("bos_token_id", "pad_token_id"))
    return TokenEntry(
        eos_ids=tuple(token for token in target.eos_ids if token in known),
        bos_id=bos_id if bos_id in known else None,
        pad_id=pad_id if pad_id in known else None,
    )


def generation_defaults(target: Checkpoint) -> dict[str, Any]:
    """The target's own defaults for generation, as far as the runtime knows them.

    Raises:
        ExportError: one is no finite number, and neither true nor false.
    """
    found = {name: target.generation[name] for name in _GENERATION_DEFAULTS if target.generation.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ExportError(
                f"{target.folder / 'generation_config.json'} says {name} {value!r}; expected a number, or true or "
                "false: correct it there"
            )
    return found


def exit_coverage(target: Checkpoint) -> dict[str, Any]:
    """What was measured of the target's exits, if a file beside its weights says so.

    Raises:
        ExportError: the file is not valid JSON.
    """
    path = target.folder / names.EXIT_COVERAGE_FILE
    if not path.is_file():
        return {}
    return read_json(path, target.role)
