"""A checkpoint on disk, a Hugging Face folder or a GGUF file, looked at before anything is loaded.

Owns: is it complete and of a kind that can be exported, its sizes, licence, and the files beside the weights.
Does not own: comparing two checkpoints (`compatibility.py`), the weights' bytes (`stored_tensors.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mirrorsd.export.checkpoints.gguf_file import is_gguf, licence_of, read_tensors, small_files
from mirrorsd.export.hub import origin_of
from mirrorsd.export.weights.stored_tensors import StoredTensor, read_header
from mirrorsd.families.registry import completed, find_obstacle
from mirrorsd.graphs import names
from mirrorsd.graphs.documents import DocumentError, parse_json, read_text
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import SourceModel

Role = Literal["target", "draft"]

_HEAD_SIZE_STEP = 16
_LICENCE_MARKS = {"Apache License": "Apache-2.0", "MIT License": "MIT", "BSD 3-Clause": "BSD-3-Clause"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checked checkpoint.

    Attributes:
        folder: Where its small files are; of a GGUF file, the folder beside it.
        role: What it is for.
        config: config.json with its sizes completed.
        generation: generation_config.json, or empty.
        source: What a manifest says of it.
        tensors: Where every weight lies.
        gguf: The GGUF file that it is; None for a folder.
    """

    folder: Path
    role: Role
    config: dict[str, Any]
    generation: dict[str, Any]
    source: SourceModel
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    gguf: Path | None = None

    @property
    def path(self) -> Path:
        """What was asked for: the folder or the GGUF file."""
        return self.gguf or self.folder

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a text, generation_config.json first.

        Raises:
            ExportError: something there is no token id.
        """
        ids: list[int] = []
        for name, document in (("generation_config.json", self.generation), ("config.json", self.config)):
            given = document.get("eos_token_id")
            listed = given if isinstance(given, list) else [] if given is None else [given]
            wrong = [token for token in listed if type(token) is not int or token < 0]
            if wrong:
                raise ExportError(
                    f"{self.folder / name} says eos_token_id {given!r}; expected are token ids such as 2 or [2, 7]: "
                    "correct it there"
                )
            ids += listed
        return tuple(dict.fromkeys(ids))

    def token_id(self, name: str) -> int | None:
        """The single id of `name` (`bos_token_id`, `pad_token_id`), None where there is none."""
        given = self.generation.get(name, self.config.get(name))
        return given if isinstance(given, int) else None


def open_checkpoint(path: Path, role: Role) -> Checkpoint:
    """Check the checkpoint in `path`, a folder or a GGUF file, and read its small files.

    Raises:
        ConfigError: a GGUF file, and the package that reads it is missing.
        ExportError: no such folder or file, no model in it, damaged weights, or a family or feature that is not
            supported.
    """
    if is_gguf(path):
        return _open_gguf(path, role)
    if not path.is_dir():
        raise ExportError(
            f"the {role} {path} is not a folder; give a local folder with config.json and *.safetensors, or a GGUF file"
        )
    config = _read_config(path, role)
    tensors = {name: stored for file in _weight_files(path, role) for name, stored in read_header(file).items()}
    return _checkpoint(path, role, config, tensors)


def _open_gguf(file: Path, role: Role) -> Checkpoint:
    folder = small_files(file)
    config = _read_config(folder, role)
    found = _checkpoint(folder, role, config, read_tensors(file, folder))
    return replace(found, gguf=file, source=replace(found.source, name=file.stem, licence=licence_of(file)))


def _checkpoint(folder: Path, role: Role, config: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> Checkpoint:
    generation, origin = folder / "generation_config.json", origin_of(folder.resolve())
    return Checkpoint(
        folder=folder,
        role=role,
        config=config,
        generation=read_json(generation, role) if generation.is_file() else {},
        source=SourceModel(
            name=origin.repository if origin else folder.resolve().name,
            family=str(config["model_type"]),
            licence=_find_licence(folder),
            num_parameters=sum(stored.size for stored in tensors.values()),
            revision=origin.revision if origin else "",
            training_seconds=training_seconds(folder, role),
        ),
        tensors=tensors,
    )


def training_seconds(folder: Path, role: str) -> float | None:
    """For how long the model in a folder was trained, where the folder says it.

    Raises:
        ExportError: what it says is no number of seconds.
    """
    path = folder / names.TRAINING_FILE
    if not path.is_file():
        return None
    seconds = read_json(path, role).get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0:
        raise ExportError(f"{path} has seconds {seconds!r}; expected a number of 0 or more. Correct it, or delete it")
    return float(seconds)


def read_json(path: Path, role: str) -> dict[str, Any]:
    """Read one of a checkpoint's JSON files.

    Raises:
        ExportError: missing, or not a JSON object.
    """
    if not path.is_file():
        raise ExportError(
            f"the {role}'s folder {path.parent} has no {path.name}: not a complete Hugging Face checkpoint"
        )
    try:
        document = parse_json(read_text(path))
    except DocumentError as error:
        raise ExportError(f"{path} {error}; download the {role} again") from error
    if not isinstance(document, dict):
        raise ExportError(f"{path} holds no JSON object; download the {role} again")
    return document


def _read_config(folder: Path, role: Role) -> dict[str, Any]:
    written = read_json(folder / "config.json", role)
    obstacle = find_obstacle(written)
    if obstacle is not None:
        raise ExportError(f"the {role} {folder} {obstacle}")
    try:
        config = completed(written)
    except ValueError as error:
        raise ExportError(f"the {role}'s {folder / 'config.json'} contradicts itself: {error}") from error
    head_size = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    if role == "target" and head_size % _HEAD_SIZE_STEP:
        raise ExportError(
            f"the target {folder} has head size {head_size}; GroupQueryAttention needs a multiple of {_HEAD_SIZE_STEP}"
        )
    return config


def _weight_files(folder: Path, role: Role) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(read_json(index, role).get("weight_map", {}).values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ExportError(f"the {role} {folder} lacks {missing[0]}, which its index names; download it again")
        return [folder / name for name in files]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ExportError(
            f"the {role} {folder} has config.json but no model.safetensors; other weight formats are not read: "
            "save the model with save_pretrained(..., safe_serialization=True)"
        )
    return [single]


def _find_licence(folder: Path) -> str:
    """SPDX id from the model card's front matter or the LICENSE file, else "unknown"."""
    card = folder / "README.md"
    if card.is_file():
        front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
        named = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
        if named:
            return named[1].strip("\"'")
    for path in sorted(folder.glob("LICENSE*")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for mark, licence in _LICENCE_MARKS.items():
            if mark in text:
                return licence
    return "unknown"
