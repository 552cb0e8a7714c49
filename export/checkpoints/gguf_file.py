"""A GGUF file as a checkpoint: config, tokenizer and names of weights by transformers' own reader.

Owns: the folder of small files beside the file, and which tensor of the file each weight is. Does not own: blocks
(`weights/gguf_tensors.py`), which families are supported (`checkpoint.py`).
"""

import importlib.util
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mirrorsd.export.checkpoints.gguf_architectures import check_architecture
from mirrorsd.export.checkpoints.gguf_gaps import check_all_read, complete_config, complete_tokenizer, ends_in
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.whole_file import write_whole

if TYPE_CHECKING:
    from mirrorsd.export.weights.gguf_tensors import GgufTensor

Array = npt.NDArray[Any]

_MADE_FROM = "made_from.json"
_MADE_BY = 9
"""Counts the ways to make the small files: those of another one are made again."""
_PART = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})(?P<end>(\.\w+)?)")
_EMBEDDING, _NO_TOKEN = "token_embd.weight", 2**32 - 1
_EXPERTS = re.compile(r"(?P<name>blk\.\d+\.ffn_(?P<part>gate|up|down)_exps)\.weight")
_SPECIAL_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""The tokens that end a text: of the whole text, of a turn, of a message that calls a tool, of a gap that is filled."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""What a file may recommend (`general.sampling.temp`), by the names of generation_config.json."""
_READ_ERRORS = (ValueError, TypeError, LookupError, OSError, NotImplementedError)


def parts_of(file: Path) -> list[Path]:
    """The files that a model is split over, in order, whichever of them is given; the file alone where it is whole.

    `big-00002-of-00003.gguf` stands for `big-00001-of-00003.gguf` and the two behind it.

    Raises:
        ExportError: one of them is missing.
    """
    found = _PART.fullmatch(file.name)
    if found is None:
        return [file]
    parts = [
        file.with_name(f"{found['name']}-{number:05d}-of-{found['count']}{found['end']}")
        for number in range(1, int(found["count"]) + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing and file.is_file():
        raise ExportError(
            f"{file} is one of {len(parts)} parts, and {missing[0]} is not beside it: put all parts into one folder"
        )
    return parts if file.is_file() else [file]


def name_of(file: Path) -> str:
    """What the model is called: the file's name without its end and the number of its part."""
    found = _PART.fullmatch(file.name)
    return found["name"] if found else file.stem


def small_files(file: Path) -> Path:
    """The folder `MODEL.files` beside `MODEL.gguf`, filled with what the file says beside its weights.

    Config, tokenizer, chat template and generation defaults in Hugging Face's form. What training puts beside a
    target's weights (exit adapters, coverage) goes there too and stays; the rest is written anew when the file changes.

    Raises:
        ConfigError: the `gguf` package is missing.
        ExportError: no such file, damaged, of an architecture that transformers cannot read, or the folder cannot be
            written.
    """
    parts = parts_of(file)
    file = parts[0]
    _check_readable(file)
    folder = file.with_suffix(names.GGUF_FILES_SUFFIX)
    stats = [part.stat() for part in parts]
    made_from = {
        "file": file.name,
        "bytes": sum(stat.st_size for stat in stats),
        "changed_ns": max(stat.st_mtime_ns for stat in stats),
        "made_by": _MADE_BY,
    }
    mark = folder / _MADE_FROM
    if _says(mark, made_from):
        return folder
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with _reading(file), _plain_header(parts) as (header, ends):
        config: Any = AutoConfig.from_pretrained(header.parent, gguf_file=header.name, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(header.parent, gguf_file=header.name, local_files_only=True)
        headers = [open_header(part) for part in parts]
        tensors = {tensor.name: tensor for of_part in headers for tensor in of_part.tensors}
        complete_config(config, file, headers[0].fields, tensors)
        complete_tokenizer(tokenizer, file, headers[0].fields)
    generation: Any = GenerationConfig.from_model_config(config)
    generation.eos_token_id = _all_ends(
        config.eos_token_id, [*ends, *ends_in(tokenizer.get_vocab(), config.vocab_size)]
    )
    generation.update(**_sampling_of(file))
    try:
        folder.mkdir(exist_ok=True)
        for old in folder.glob("chat_template*"):  # of the file that was here before; this one may have none
            old.unlink()
        shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
        config.save_pretrained(folder)
        generation.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_whole(mark, f"{json.dumps(made_from)}\n".encode())
    except OSError as error:
        raise ExportError(
            f"{folder} cannot be written ({error}); what {file.name} says of its tokenizer and config goes there: move "
            "the file to a folder that can be written to"
        ) from error
    return folder


def _says(mark: Path, made_from: Mapping[str, object]) -> bool:
    """Whether the small files were made from this; a mark that was cut short says nothing."""
    try:
        return bool(json.loads(mark.read_text(encoding="utf-8")) == made_from)
    except (OSError, ValueError):
        return False


@contextmanager
def _plain_header(parts: Sequence[Path]) -> Iterator[tuple[Path, list[int]]]:
    """A file that transformers' reader understands, and the ids that end a text.

    It is the model's own file, unless that is split or names a token that there is not (4294967295 for none): then it
    is a copy of what the file says, without its weights, for as long as the context lasts.
    """
    from gguf import GGUFReader, GGUFWriter

    headers = [open_header(part) for part in parts]
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    num_tokens = int(tensors[_EMBEDDING].shape[1]) if _EMBEDDING in tensors else _NO_TOKEN
    given = {name: int(field.contents()) for name, field in headers[0].fields.items() if _SPECIAL_ID.fullmatch(name)}
    unknown = {name for name, token in given.items() if token >= num_tokens}
    ends = [given[name] for name in _ENDS if name in given and name not in unknown]
    if len(parts) == 1 and not unknown:
        yield parts[0], ends
        return
    with tempfile.TemporaryDirectory() as place:
        copy, fields = Path(place, "header.gguf"), GGUFReader(parts[0]).fields
        writer = GGUFWriter(copy, str(fields["general.architecture"].contents()))
        for name, field in fields.items():
            is_written = name.startswith(("GGUF.", "split.")) or name == "general.architecture"
            if not (is_written or name in unknown):
                writer.add_key_value(
                    name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None
                )
        for name in tensors:  # by the names alone transformers sees whether the embedding is tied
            writer.add_tensor(name, np.zeros(1, np.float32))
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        yield copy, ends


def _all_ends(given: Any, ends: Sequence[int]) -> Any:
    """The ids that end a text: those that transformers finds first, one alone where there is no other."""
    found = list(dict.fromkeys([*(given if isinstance(given, list) else [] if given is None else [given]), *ends]))
    return found if len(found) > 1 else next(iter(found), None)


def _sampling_of(file: Path) -> dict[str, Any]:
    """How the file says its model is sampled, as generation_config.json has it; empty where it does not."""
    fields = open_header(file).fields
    found = {name: fields.get(f"general.sampling.{of_file}") for of_file, name in _SAMPLING.items()}
    given = {name: field.contents() for name, field in found.items() if field is not None}
    return given | ({"do_sample": given["temperature"] > 0} if "temperature" in given else {})


def licence_of(file: Path) -> str:
    """The licence that the file names (an SPDX id by custom), else "unknown"."""
    named = open_header(parts_of(file)[0]).fields.get("general.license")
    return "unknown" if named is None else str(named.contents())


def read_tensors(file: Path, folder: Path) -> "dict[str, GgufTensor]":
    """The file's tensors by Hugging Face's names; `folder` holds its config. No numbers are read.

    Raises:
        ExportError: damaged, or blocks of a kind that the `gguf` package cannot undo.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    parts = parts_of(file)
    with _reading(file):
        readers = [(part, open_header(part)) for part in parts]
        reader = readers[0][1]
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        architecture = str(reader.fields["general.architecture"].contents())
        chosen: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        processor = chosen(config=config.to_dict())
        names = get_gguf_hf_weights_map(_OuterModules(model), processor)
        convert = partial(_convert, processor, names)
        found: dict[str, GgufTensor] = {}
        left: list[str] = []
        for part, of_part in readers:
            _check_kinds(part, of_part.tensors)
            for tensor in of_part.tensors:
                if tensor.name in names:
                    found[names[tensor.name]] = _tensor(part, tensor, names, convert)
                elif (of_experts := _EXPERTS.fullmatch(tensor.name)) is not None and of_experts["name"] in names:
                    place = names[of_experts["name"]].rpartition(".")[0]
                    found |= _experts(part, tensor, f"{place}.{{}}.{of_experts['part']}_proj.weight")
                else:
                    left.append(tensor.name)
        check_all_read(file, left)
        return found


class _OuterModules:
    """What transformers asks a model for while it looks for names: tensors of the model and of modules outside layers.

    It asks every module down to the last norm for the names that its own tensors have, and makes the table of all names
    anew for each, which takes four seconds at 28 layers. A file may hold a model without its head; none holds a layer
    alone.
    """

    def __init__(self, module: Any) -> None:
        self.config, self.state_dict, self._module = getattr(module, "config", None), module.state_dict, module

    def named_children(self) -> "list[tuple[str, _OuterModules]]":
        """The modules inside, without lists of layers."""
        from torch.nn import ModuleList

        inside = self._module.named_children()
        return [(name, _OuterModules(module)) for name, module in inside if not isinstance(module, ModuleList)]


def _experts(file: Path, tensor: Any, name: str) -> "dict[str, GgufTensor]":
    """Matrices `[N, K]` of all experts, which a file holds as one tensor `[E, N, K]`; `{}` in `name` counts them."""
    from mirrorsd.export.weights.gguf_tensors import GgufTensor

    width, num_rows, num_experts = (int(size) for size in tensor.shape)
    order = np.arange(num_rows)
    return {
        name.format(number): GgufTensor(
            path=file,
            name=name.format(number),
            dtype=tensor.tensor_type.name,
            shape=(num_rows, width),
            offset=int(tensor.data_offset) + number * int(tensor.n_bytes) // num_experts,
            content=tensor.data[number],
            kind=tensor.tensor_type,
            order=order,
            convert=lambda floats: floats,
        )
        for number in range(num_experts)
    }


def _tensor(file: Path, tensor: Any, names: Mapping[str, str], convert: Any) -> "GgufTensor":
    from mirrorsd.export.weights.gguf_tensors import GgufTensor

    stored = tuple(int(size) for size in reversed(tensor.shape))
    order = _row_order(partial(convert, tensor.name), stored[0]) if len(stored) == 2 else None
    shape = stored
    if order is None:
        shape = convert(tensor.name, np.broadcast_to(np.float32(0), stored)).shape
    return GgufTensor(
        path=file,
        name=names[tensor.name],
        dtype=tensor.tensor_type.name,
        shape=shape,
        offset=int(tensor.data_offset),
        content=tensor.data,
        kind=tensor.tensor_type,
        order=order,
        convert=partial(convert, tensor.name),
    )


def _convert(processor: Any, names: Mapping[str, str], name: str, weights: Array) -> Array:
    """What transformers makes of a tensor's floats: llama.cpp turns the rows of queries and keys, and so on."""
    given = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": {}}}  # where GPT-2's head is put, too
    made: Array = processor.process(weights=weights, name=name, **given).weights
    return made


def _row_order(convert: Any, num_rows: int) -> Array | None:
    """Which row each of the converted tensor's rows was, None where it did more than move rows.

    Seen on a matrix `[n, 3]` whose numbers are those of its rows.
    """
    numbered = np.repeat(np.arange(num_rows, dtype=np.float64)[:, None], 3, axis=1)
    moved = convert(numbered)
    is_moved = moved.shape == numbered.shape and (moved == moved[:, :1]).all()
    order: Array = moved[:, 0].astype(np.int64) if is_moved else np.empty(0, np.int64)
    return order if np.array_equal(np.sort(order), np.arange(num_rows)) else None


def _check_kinds(file: Path, tensors: Any) -> None:
    """Undo one row of every kind of blocks."""
    from gguf.quants import dequantize

    examples = {tensor.tensor_type: tensor for tensor in tensors}
    for kind, tensor in examples.items():
        try:
            dequantize(np.ascontiguousarray(tensor.data[:1]), kind)
        except NotImplementedError as error:
            raise ExportError(
                f"{file} holds {tensor.name!r} as {kind.name}, which the gguf package cannot turn into floats; take "
                "the file in another quantisation, such as Q4_0, Q4_1, Q8_0 or F16"
            ) from error


def open_header(file: Path) -> Any:
    """The `gguf` package's reader of `file`, which has stepped over lists: it knows tensors and single values.

    A vocabulary's tokens and merges, one by one as arrays, take the package six seconds and half a gigabyte.

    Raises:
        ValueError, IndexError: no GGUF file, or damaged.
    """
    from gguf import GGUFEndian, GGUFReader, GGUFValueType

    class Header(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != GGUFValueType.ARRAY:
                found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
                return found
            order: Any = "little" if self.endianess == GGUFEndian.LITTLE else "big"
            kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            length, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            if kind != GGUFValueType.STRING:
                return 12 + length * np.dtype(self.gguf_scalar_to_np[kind]).itemsize, [], [], [raw_type, kind]
            raw, end = self.data.data, start
            for _ in range(length):
                end += 8 + int.from_bytes(raw[end : end + 8], order)
                if end > len(raw):
                    raise ValueError(f"the file ends within a list of {length} strings")
            return end - orig_offs, [], [], [raw_type, kind]

    return Header(file)


def _check_readable(file: Path) -> None:
    if not file.is_file():
        raise ExportError(f"{file} does not exist; give a GGUF file, or a folder with config.json and *.safetensors")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"reading {file.name} needs the gguf package: pip install gguf (or mirrorsd[export])")
    with _reading(file):
        field = open_header(file).fields.get("general.architecture")
        architecture = None if field is None else str(field.contents())
    check_architecture(file, architecture)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise what transformers and gguf find wrong with `file` as ours, and keep their own talk off the terminal."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    except _READ_ERRORS as error:
        raise ExportError(f"{file} cannot be read as a GGUF model: {' '.join(str(error).split())}") from error
    finally:
        transformers_logging.set_verbosity(level)
