"""What is carried over from the checkpoints as it is: tokenizer, chat template, licences, generation defaults.

Owns: which files travel and where to. Does not own: reading them at run time.
"""

import math
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mirrorsd.export.checkpoints.checkpoint import Checkpoint, read_json
from mirrorsd.families.tokenizers import cut_as_in_file, probe_texts, special_texts
from mirrorsd.graphs import names
from mirrorsd.graphs.chat_defaults import ChatDefaults, chat_defaults
from mirrorsd.graphs.errors import BundleError, ConfigError, ExportError
from mirrorsd.graphs.manifest import TokenEntry
from mirrorsd.texts.chat_template import ChatTemplate
from mirrorsd.texts.config import LEAST_TEMPERATURE, GenerationConfig

_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATE_NAME = re.compile(r"[\w-]+")
_GENERATION_DEFAULTS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)
_EVERY_TOKEN = ("top_k", -1)
"""As other engines write it."""
_WHOLE = ("top_k", "max_new_tokens")
_OF_EVERY_TEXT = ("do_sample", "repetition_penalty")
_NOT_FOLLOWED: dict[str, Any] = {
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("num_beams", "guidance_scale"), 1),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings", "sequence_bias")),
    "exponential_decay_length_penalty": None,
}
_NOT_SAMPLED_BY: dict[str, Any] = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
"""What changes no token, besides what is empty."""


def copy_tokenizer(target: Checkpoint, bundle: Path) -> None:
    """Write the tokenizer as transformers loads it, with all that side files add, and its chat templates.

    Raises:
        ExportError: transformers cannot load it, it has no form that the runtime reads, what was written makes other
            ids of a text, or a chat template is none.
    """
    for name in (_SETTINGS, "special_tokens_map.json", "added_tokens.json"):
        if (target.folder / name).is_file():
            read_json(target.folder / name, target.role)
    theirs = _load_tokenizer(target)
    cut_as_in_file(theirs, target.folder)
    templates = _chat_templates(theirs.chat_template, target)
    folder = bundle / names.TOKENIZER_FOLDER
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        theirs.save_pretrained(place)
        for name in (_TOKENIZER, _SETTINGS):
            shutil.copyfile(Path(place, name), folder / name)
    for name, template in templates.items():
        is_default = name == names.DEFAULT_TEMPLATE
        file = names.CHAT_TEMPLATE_FILE if is_default else names.NAMED_TEMPLATE_FILE.format(name)
        (folder / file).write_text(template, encoding="utf-8", newline="")
        _check_template(name, folder / file, target)
    _check_ids(theirs, folder, target)


def _load_tokenizer(target: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(target.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever reading a stranger's files raises
        reason = " ".join(str(error).split())
        raise ExportError(
            f"transformers cannot load the tokenizer of the {target.role} {target.folder}: {reason}"
        ) from error
    if not hasattr(found, "backend_tokenizer"):
        raise ExportError(
            f"the tokenizer of the {target.role} {target.folder} is a {type(found).__name__}, which is not of the "
            "tokenizers package: save a fast tokenizer there (tokenizer.json)"
        )
    return found


def _chat_templates(given: str | Mapping[str, str] | None, target: Checkpoint) -> dict[str, str]:
    """By name; the only one of any name is the default."""
    if not given:
        return {}
    if isinstance(given, str):
        return {names.DEFAULT_TEMPLATE: given}
    wrong = [name for name in given if not _TEMPLATE_NAME.fullmatch(name)]
    if wrong:
        raise ExportError(
            f"the {target.role} {target.folder} names a chat template {wrong[0]!r}; allowed: letters, digits, - and _"
        )
    return dict(given) if len(given) > 1 else {names.DEFAULT_TEMPLATE: next(iter(given.values()))}


def _check_template(name: str, file: Path, target: Checkpoint) -> None:
    """Compile it: no bundle opens with a template that is none."""
    try:
        ChatTemplate({name: file})
    except BundleError as error:
        raise ExportError(
            f"the chat template {name!r} of the {target.role} {target.folder} cannot be read ({error.__cause__}): "
            "correct it there, or take it away"
        ) from error


def _check_ids(theirs: Any, folder: Path, target: Checkpoint) -> None:
    """Compare the ids of what was written with transformers', on texts that spell every special token."""
    written = Tokenizer.from_file(str(folder / _TOKENIZER))
    written.no_truncation()
    written.no_padding()
    written.encode_special_tokens = bool(read_json(folder / _SETTINGS, target.role).get("split_special_tokens"))
    for text in probe_texts(special_texts(theirs)):
        wanted, found = theirs(text)["input_ids"], written.encode(text).ids
        if wanted != found:
            first = next(
                n for n in range(len(text) + 1) if theirs(text[:n])["input_ids"] != written.encode(text[:n]).ids
            )
            raise ExportError(
                f"the tokenizer of the {target.role} {target.folder} cannot be carried over: of {text[:first]!r} "
                f"transformers makes {theirs(text[:first])['input_ids'][-8:]}, tokenizer.json "
                f"{written.encode(text[:first]).ids[-8:]} (last ids)"
            )


def copy_licences(checkpoint: Checkpoint, bundle: Path) -> None:
    """Copy licence texts and the model card into `licences/target` or `licences/draft`."""
    found = [path for name in names.LICENCE_FILES for path in sorted(checkpoint.folder.glob(name)) if path.is_file()]
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

    A temperature below any that the runtime samples at is greedy: Qwen2.5-VL says 1e-6. A number that no text could
    take is left out where nothing is sampled, since nobody reads it then.

    Raises:
        ExportError: one is no number, and neither true nor false; or every text would be refused for it.
    """
    given = {name: target.generation[name] for name in _GENERATION_DEFAULTS if target.generation.get(name) is not None}
    found = {name: _as_read(name, value) for name, value in given.items() if (name, value) != _EVERY_TOKEN}
    temperature = found.get("temperature")
    if isinstance(temperature, int | float) and 0 <= temperature < LEAST_TEMPERATURE:
        del found["temperature"]
        found["do_sample"] = False
    for name, value in list(found.items()):
        try:
            GenerationConfig(**{name: value})
        except ConfigError as error:
            is_number = isinstance(value, int | float) and abs(value) < math.inf
            if found.get("do_sample") or name in _OF_EVERY_TEXT or not is_number:
                path = target.folder / "generation_config.json"
                raise ExportError(f"{path} cannot be taken: {error} Correct it there") from error
            del found[name]
    return found


def tell_what_is_not_followed(target: Checkpoint) -> None:
    """Warn of entries by which transformers' `generate` chooses other tokens than any text of a bundle."""
    asked = _NOT_FOLLOWED | (_NOT_SAMPLED_BY if target.generation.get("do_sample") else {})
    named = [name for name, usual in asked.items() if target.generation.get(name) not in (None, [], {}, usual)]
    if named:
        message = (
            f"{target.folder / 'generation_config.json'} names {', '.join(named)}, which no text of a bundle follows: "
            "transformers, which does, may write other texts"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _as_read(name: str, value: Any) -> Any:
    """A default as transformers takes it: 1 for true, and 50.0 for 50."""
    if name == "do_sample" and value in (0, 1):
        return bool(value)
    return int(value) if name in _WHOLE and isinstance(value, float) and value.is_integer() else value


def chat_entry(target: Checkpoint, bundle: Path) -> ChatDefaults | None:
    """How a chat with the model in `bundle` is sampled; None where its tokenizer brings no chat template."""
    is_chat_model = (bundle / names.TOKENIZER_FOLDER / names.CHAT_TEMPLATE_FILE).is_file()
    return chat_defaults(target.source.family, generation_defaults(target)) if is_chat_model else None


def exit_coverage(target: Checkpoint) -> dict[str, Any]:
    """What was measured of the target's exits, if a file beside its weights says so.

    Raises:
        ExportError: the file is not valid JSON.
    """
    path = target.folder / names.EXIT_COVERAGE_FILE
    if not path.is_file():
        return {}
    return read_json(path, target.role)
