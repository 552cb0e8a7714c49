"""A checkpoint on disk, a Hugging Face folder or a GGUF file, looked at before anything is loaded.

Owns: is it complete and of a kind that can be exported, its sizes, licence, and the files beside the weights.
Does not own: comparing two checkpoints (`compatibility.py`), the weights' bytes (`stored_tensors.py`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from mirrorsd.export.checkpoints.end_token import end_token
from mirrorsd.export.checkpoints.gguf_file import licence_of, name_of, read_tensors, small_files
from mirrorsd.export.checkpoints.licence import find_licence
from mirrorsd.export.weights.expert_tensors import with_separate_experts
from mirrorsd.export.weights.stored_tensors import StoredTensor, read_header
from mirrorsd.families.positions import smallest_window
from mirrorsd.families.registry import BESIDE_THE_TEXT, FAMILIES, completed, find_obstacle, text_part
from mirrorsd.graphs import names
from mirrorsd.graphs.documents import DocumentError, parse_json, read_text
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import SourceModel
from mirrorsd.graphs.whole_file import is_gguf
from mirrorsd.hub.checkpoints import origin_of

Role = Literal["target", "draft"]

_HEAD_SIZE_STEP = 16
_WEIGHTS, _INDEX_END = "model.safetensors", ".index.json"
_NAMED_WEIGHTS = "transformers_weights"
_OTHER_CONFIGS = "configuration_files"
_ADAPTER = "adapter_config.json"
_WRITES_TOKENIZER = "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
_DISTRIBUTED_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_HELD = ("num_hidden_layers", "n_layer", "num_experts", "num_local_experts")
"""Of each of these there is a tensor at least."""
_SIZES = (
    _HELD,
    ("hidden_size", "n_embd", "vocab_size", "intermediate_size", "n_inner", "ffn_dim", "word_embed_proj_dim"),
    ("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"),
    ("max_position_embeddings", "n_positions"),
    ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""Entries of config.json that count something, by the names that families give them."""


_MOST_LABELS = 1_000_000
"""Names that transformers makes of a number in config.json before anything else is looked at."""
WHOLE_BYTES = 1 << 30
"""Up to this the float32 numbers of a whole model are held at once, for a moment, to run it as transformers does."""


def whole_bytes(num_parameters: int) -> int:
    """Bytes of a model's float32 numbers where it may be held as a whole; 0 where it is too large for that."""
    needed = 4 * num_parameters
    return needed if needed <= WHOLE_BYTES else 0


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
        """Every id that ends a text, generation_config.json first; the tokenizer's where the configs name none.

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
        if not ids and (of_tokenizer := end_token(self.folder)) is not None:
            ids = [of_tokenizer]
        return tuple(dict.fromkeys(ids))

    def token_id(self, name: str) -> int | None:
        """The single id of `name` (`bos_token_id`, `pad_token_id`), None where there is none.

        Raises:
            ExportError: something there is no token id.
        """
        source = "generation_config.json" if name in self.generation else "config.json"
        given = self.generation.get(name, self.config.get(name))
        if given is not None and type(given) is not int:
            raise ExportError(
                f"{self.folder / source} says {name} {given!r}; expected a token id such as 2, or null: correct it "
                "there"
            )
        return given


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
    _refuse_others(path, role)
    written = _read_config(path, role)
    files = _weight_files(path, role, written)
    mixture = FAMILIES[str(written["model_type"])].mixture
    tensors = with_separate_experts(
        {name: stored for file in files for name, stored in read_header(file).items()},
        is_turned=mixture is not None and mixture.is_turned,
    )
    return _checkpoint(path, role, _completed(path, role, written, len(tensors)), tensors)


def check_config(folder: Path, role: Role) -> None:
    """Refuse what a folder's config.json alone says that cannot be exported; its weights need not be there.

    Raises:
        ExportError: no config.json, or a family, a feature or sizes that are not supported.
    """
    _completed(folder, role, _read_config(folder, role), math.inf)


def _open_gguf(file: Path, role: Role) -> Checkpoint:
    folder = small_files(file)
    written = _read_config(folder, role)
    mixture = FAMILIES[str(written["model_type"])].mixture
    if mixture is not None and mixture.is_turned:
        raise ExportError(
            f"the {role} {file} is a GGUF file of {written['model_type']}, whose experts are not read from there: take "
            "its Hugging Face folder (config.json and *.safetensors)"
        )
    tensors = read_tensors(file, folder)
    found = _checkpoint(folder, role, _completed(folder, role, written, len(tensors)), tensors)
    name = found.source.name if found.source.revision else name_of(file)
    return replace(found, gguf=file, source=replace(found.source, name=name, licence=licence_of(file)))


def _checkpoint(folder: Path, role: Role, config: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> Checkpoint:
    generation, origin = folder / "generation_config.json", origin_of(folder)
    return Checkpoint(
        folder=folder,
        role=role,
        config=config,
        generation=read_json(generation, role) if generation.is_file() else {},
        source=SourceModel(
            name=origin.repository if origin else folder.resolve().name,
            family=str(config["model_type"]),
            licence=find_licence(folder),
            num_parameters=sum(stored.size for name, stored in tensors.items() if not name.startswith(BESIDE_THE_TEXT)),
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
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ExportError(f"{path} has seconds {seconds!r}; expected a number of 0 or more. Correct it, or delete it")
    return float(seconds)


def read_json(path: Path, role: str) -> dict[str, Any]:
    """Read one of a checkpoint's JSON files.

    Raises:
        ExportError: missing, or not a JSON object.
    """
    if not path.is_file():
        todo = f": write it with {_WRITES_TOKENIZER}" if path.name == "tokenizer.json" else ""
        raise ExportError(
            f"the {role}'s folder {path.parent} has no {path.name}: not a complete Hugging Face checkpoint{todo}"
        )
    try:
        document = parse_json(read_text(path))
    except DocumentError as error:
        raise ExportError(f"{path} {error}; download the {role} again") from error
    if not isinstance(document, dict):
        raise ExportError(f"{path} holds no JSON object; download the {role} again")
    return document


def _read_config(folder: Path, role: Role) -> dict[str, Any]:
    """config.json as it is written, of a model that can be exported."""
    written = text_part(read_json(folder / "config.json", role))
    obstacle = find_obstacle(written, is_draft=role == "draft")
    if obstacle is not None:
        raise ExportError(f"the {role} {folder} {obstacle}")
    if _OTHER_CONFIGS in written:
        raise ExportError(
            f"the {role}'s {folder / 'config.json'} has {_OTHER_CONFIGS} {written[_OTHER_CONFIGS]!r}: transformers may "
            "read another file by its version. Keep the right one as config.json, without that entry"
        )
    return written


def _completed(folder: Path, role: Role, written: dict[str, Any], num_tensors: float) -> dict[str, Any]:
    """The config with its sizes completed.

    Raises:
        ExportError: a size is none, or sizes contradict each other or the weights.
    """
    path = folder / "config.json"
    for names_of_one in _SIZES:
        for name in set(names_of_one) & written.keys():
            value = written[name]
            if value is not None and (type(value) is not int or value < 1):
                raise ExportError(f"the {role}'s {path} has {name} {value!r}; expected a whole number of 1 or more")
            if names_of_one is _HELD and value is not None and value > num_tensors:
                raise ExportError(
                    f"the {role}'s {path} has {name} {value}; {folder} holds {num_tensors} tensors, fewer than one for "
                    "each: its config.json and its weights do not belong together"
                )
    labels = written.get("num_labels")
    if isinstance(labels, int | float) and not abs(labels) <= _MOST_LABELS:
        raise ExportError(
            f"the {role}'s {path} has num_labels {labels!r}, and transformers makes a name for each; expected at most "
            f"{_MOST_LABELS}, or none: a language model has no labels"
        )
    try:
        config = completed(written)
    except ValueError as error:
        raise ExportError(f"the {role}'s {path} contradicts itself: {error}") from error
    window = smallest_window(config)
    if window is not None and window < 1:
        raise ExportError(
            f"the {role}'s {path} has sliding_window {window}; expected a whole number of 1 or more, or null where no "
            "layer has a window"
        )
    num_heads, num_groups = config["num_attention_heads"], config["num_key_value_heads"]
    if num_groups and num_heads % num_groups:
        raise ExportError(
            f"the {role}'s {path} has num_attention_heads {num_heads} and num_key_value_heads {num_groups}; expected a "
            "multiple"
        )
    head_size = config["head_dim"] or config["hidden_size"] // num_heads
    if role == "target" and head_size % _HEAD_SIZE_STEP:
        raise ExportError(
            f"the target {folder} has head size {head_size}; GroupQueryAttention needs a multiple of {_HEAD_SIZE_STEP}"
        )
    return config


def _weight_files(folder: Path, role: Role, config: Mapping[str, Any]) -> list[Path]:
    """The files that transformers reads a folder's weights from, in its order of precedence.

    That is the file that config.json names, else `model.safetensors`, else the shards of the index.

    Raises:
        ExportError: none of them is there, or an index is damaged or names what is not there.
    """
    named = config.get(_NAMED_WEIGHTS)
    if named is not None and not (isinstance(named, str) and named.endswith((".safetensors", _INDEX_END))):
        raise ExportError(
            f"the {role}'s {folder / 'config.json'} has {_NAMED_WEIGHTS} {named!r}; expected a *.safetensors file"
        )
    for name in (_WEIGHTS, _WEIGHTS + _INDEX_END) if named is None else (named,):
        path = _inside(folder, name, folder / "config.json", role)
        if path.name.endswith(_INDEX_END) and _is_file(path):
            return _shards(path, folder, role)
        if _is_file(path):
            return [path]
    if named is None and any(folder.glob("*.safetensors")):
        raise ExportError(
            f"the {role} {folder} holds *.safetensors files, and neither {_WEIGHTS} nor {_WEIGHTS + _INDEX_END}, which "
            "says what is where: fetch the rest of the model"
        )
    raise ExportError(
        f"the {role} {folder} has config.json but no {named or _WEIGHTS}; other weight formats are not read: "
        "save the model with save_pretrained(..., safe_serialization=True)"
    )


def _refuse_others(folder: Path, role: Role) -> None:
    """Refuse what transformers would load instead of the weights, or add to them."""
    for path in sorted(folder.iterdir()):
        if _DISTRIBUTED_SHARD.fullmatch(path.name):
            raise ExportError(
                f"the {role} {folder} holds {path.name}, a shard of distributed training, which transformers takes "
                "first: save the model with save_pretrained, or move the shards away"
            )
    if (folder / _ADAPTER).is_file():
        raise ExportError(
            f"the {role} {folder} holds {_ADAPTER}: an adapter, which transformers adds to a model's weights where "
            "peft is installed. Merge it (merge_and_unload) and save the model, or move the adapter away"
        )


def _shards(index: Path, folder: Path, role: Role) -> list[Path]:
    """The files that an index names."""
    document = read_json(index, role)
    weight_map = _table(index, document, "weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ExportError(
                f"{index} has {file!r} as 'weight_map.{tensor}'; expected a *.safetensors file. Download the {role} "
                "again"
            )
    if not weight_map:
        raise ExportError(f"{index} has an empty 'weight_map'. Download the {role} again")
    files = {file: _inside(folder, file, index, role) for file in sorted(set(weight_map.values()))}
    missing = [file for file, path in files.items() if not _is_file(path)]
    if missing:
        raise ExportError(f"the {role} {folder} lacks {missing[0]}, which its index names; download it again")
    _table(index, document, "metadata")  # transformers does not read an index without it
    return list(files.values())


def _table(path: Path, document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name)
    if not isinstance(found, dict):
        there = repr(found) if name in document else "nothing"
        raise ExportError(f"{path} has {there} as {name!r}; expected a table. Download it again")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that the system does not take
        return False


def _inside(folder: Path, name: str, source: Path, role: Role) -> Path:
    """The file `name` of a folder, by what `source` says.

    Raises:
        ExportError: it leaves the folder.
    """
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or ".." in re.split(r"[/\\]", name):
        raise ExportError(f"{source} names {name!r}, a file outside the {role}'s folder; expected one inside it")
    return folder / name
