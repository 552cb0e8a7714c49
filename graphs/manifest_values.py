"""Which values a manifest may hold: positive sizes, a chain of segments over all layers, exits at its borders, ...

Owns: reading a manifest, and the rules. Does not own: the document's types (`manifest`), the files themselves
(`bundle_files`).
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import isfinite
from pathlib import PurePosixPath
from re import fullmatch
from typing import Any, NamedTuple

from mirrorsd.graphs import names
from mirrorsd.graphs.documents import DocumentError, build, parse_json
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import CHECKSUM, FOR_PROCESSORS, SCHEMA_VERSION, Manifest, with_checksum

LARGEST = 2**31 - 1
"""Lengths and positions travel as int32 (`seqlens_k`)."""
_LARGEST_INT = 2**63
MOST_GUESSES = 31
"""Tokens that a head may guess in one run: as many as a window may have."""
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4", "file")
TARGET_DTYPES, DRAFT_DTYPES = ("float32", "float16", "bfloat16"), ("float32", "float16")
_TARGET_SIZES = ("num_layers", "hidden_size", "vocab_size", "num_kv_heads", "head_dim")
_DRAFT_SIZES = ("num_layers", "vocab_size", "num_kv_heads", "head_dim")
_MOST_SHOWN = 80


class Rule(NamedTuple):
    """One rule: whether it holds, the field, what was found there, and what is allowed."""

    holds: bool
    field: str
    found: object
    allowed: str


def read_manifest(text: str, *, origin: str) -> Manifest:
    """Read the document; `origin` names the file in messages.

    Raises:
        BundleError: not JSON, another schema, changed since it was written, a missing or wrongly typed field, a value
            that cannot be, a path that leaves the bundle.
    """
    try:
        document = parse_json(text)
    except DocumentError as error:
        raise BundleError(f"{origin} {error}. Export the bundle again.") from error
    _check_schema(document, origin)
    _check_checksum(document, origin)
    check_numbers(document, origin)
    try:
        manifest = build(Manifest, document)
    except DocumentError as error:
        raise BundleError(_in_words(error, origin)) from error
    for path in manifest.files:
        check_inside(path, origin)
    for path in manifest.used_files():
        if check_inside(path, origin) not in manifest.files:
            raise BundleError(f"{origin} uses {path!r} but lists no such file. Export the bundle again.")
    check_values(manifest, origin)
    return manifest


def check_inside(path: str, origin: str) -> str:
    """Return `path` unchanged if it is a plain relative path inside the bundle.

    Raises:
        BundleError: empty, absolute, with a drive, a backslash or what cannot be printed, or with a `..` part.
    """
    parts = PurePosixPath(path).parts
    is_plain = bool(parts) and path.isprintable() and not any(mark in path for mark in "\\:")
    if not is_plain or path.startswith("/") or ".." in parts:
        raise BundleError(
            f"{origin} names the path {path!r}, which leaves the bundle's folder. "
            "Only relative paths inside the bundle are allowed: do not use this bundle."
        )
    return path


def _check_schema(document: object, origin: str) -> None:
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
        raise BundleError(f"{origin} has no schema number, so it is not a mirrorsd manifest.")
    schema = document["schema"]
    if schema > SCHEMA_VERSION:
        raise BundleError(
            f"{origin} has schema {schema}; this mirrorsd reads up to {SCHEMA_VERSION}. Upgrade mirrorsd."
        )
    if schema < SCHEMA_VERSION:
        raise BundleError(
            f"{origin} has schema {schema}; this mirrorsd reads {SCHEMA_VERSION}. Export the bundle again."
        )


def _check_checksum(document: dict[str, Any], origin: str) -> None:
    """Take the checksum out of the document, and refuse one that does not fit the rest."""
    expected = with_checksum(document)[CHECKSUM]
    found = document.pop(CHECKSUM, None)
    if found != expected:
        raise BundleError(
            f"{origin} was changed after its export: it says checksum {str(found)[:12]!r}, its content has "
            f"{expected[:12]!r}. Copy the bundle again, or export it again."
        )


def _in_words(error: DocumentError, origin: str) -> str:
    table = error.parent or "the manifest"
    if error.flaw == "missing":
        return f"{origin}: {table} is incomplete ({error.name!r} is missing)."
    if error.flaw == "unknown":
        return f"{origin}: unknown field {error.name!r} in {table}."
    return f"{origin}: field {error.where!r} has the wrong type ({error})."


def check_values(manifest: Manifest, origin: str) -> None:
    """Refuse a manifest whose values are of the right types and impossible all the same.

    Raises:
        BundleError: names the field, what was found and what is allowed.
    """
    for rules in (_target_rules, _chain_rules, _draft_rules, _head_rules, _token_rules, _report_rules):
        for rule in rules(manifest):
            if not rule.holds:
                found = repr(rule.found)
                shown = found if len(found) <= _MOST_SHOWN else f"{found[:_MOST_SHOWN]}..."
                raise BundleError(
                    f"{origin}: {rule.field} is {shown}; allowed: {rule.allowed}. Export the bundle again."
                )


def check_numbers(value: object, origin: str, where: str = "") -> None:
    """Refuse numbers anywhere in a parsed document that are NaN, infinite, or integers of more than 64 bits.

    Raises:
        BundleError: names the field.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            check_numbers(item, origin, f"{where}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_numbers(item, origin, f"{where}[{index}]")
    elif (isinstance(value, float) and not isfinite(value)) or (isinstance(value, int) and abs(value) > _LARGEST_INT):
        shown = value if isinstance(value, float) else "an integer of more"
        raise BundleError(
            f"{origin}: {where.lstrip('.')} is {shown}; allowed: finite numbers of 64 bits. Export the bundle again."
        )


def _within(where: str, found: int | None, least: int, most: int = LARGEST) -> Rule:
    return Rule(found is not None and least <= found <= most, where, found, f"{least} to {most}")


def _sizes(where: str, entry: object, fields: Iterable[str], least: int = 1) -> Iterator[Rule]:
    return (_within(f"{where}.{name}", getattr(entry, name), least) for name in fields)


def _one_of(where: str, found: object, allowed: tuple[str, ...]) -> Rule:
    return Rule(found in allowed, where, found, ", ".join(allowed))


def _share(where: str, found: float) -> Rule:
    return Rule(0.0 <= found <= 1.0, where, found, "0 to 1")


def _target_rules(manifest: Manifest) -> Iterator[Rule]:
    target = manifest.target
    yield _within("target.source.num_parameters", target.source.num_parameters, 1, _LARGEST_INT)
    yield from _sizes("target.shape", target.shape, _TARGET_SIZES)
    yield _within("target.shape.num_experts", target.shape.num_experts, 0)
    yield _within("target.shape.num_active", target.shape.num_active, 0, target.shape.num_experts)
    yield _one_of("target.shape.dtype", target.shape.dtype, TARGET_DTYPES)
    yield _one_of("target.precision", target.precision, PRECISIONS)
    yield _within("target.context", target.context, 1)
    yield _within("target.spare_rows", target.spare_rows, 0, target.context)
    yield _within("target.row_group", target.row_group, 1, target.context)
    yield _within("target.context + row_group - 1 + spare_rows", target.capacity, 1)
    yield _within("target.read_bytes", target.read_bytes, 0, _LARGEST_INT)
    if (storage := target.storage) is not None:
        for name in ("layers", "head", "embedding"):
            yield _one_of(f"target.storage.{name}", getattr(storage, name), PRECISIONS)
        if storage.block_size is not None:
            yield _within("target.storage.block_size", storage.block_size, 1)


def _chain_rules(manifest: Manifest) -> Iterator[Rule]:
    """Segments follow each other over all layers, and there is one exit at every border."""
    target = manifest.target
    segments = target.segments
    yield Rule(bool(segments), "target.segments", [], "one segment or more")
    borders = [0, *(segment.end_layer for segment in segments)]
    for index, segment in enumerate(segments):
        where = f"target.segments[{index}]"
        follows = f"{borders[index]}, where the segment before it ends"
        yield Rule(segment.first_layer == borders[index], f"{where}.first_layer", segment.first_layer, follows)
        yield _within(f"{where}.end_layer", segment.end_layer, segment.first_layer + 1, target.shape.num_layers)
    last = f"target.segments[{len(segments) - 1}].end_layer"
    yield _within(last, borders[-1], target.shape.num_layers, target.shape.num_layers)
    layers = [point.layer for point in target.exits]
    yield Rule(
        sorted(layers) == borders[1:-1], "target.exits: layers", layers, f"{borders[1:-1]}, the segments' borders"
    )
    for index, point in enumerate(target.exits):
        where = f"target.exits[{index}]"
        yield _within(f"{where}.num_candidates", point.num_candidates, 1, target.shape.vocab_size)
        yield _within(f"{where}.adapter_rank", point.adapter_rank, 0)
    yield from _file_rules(manifest)


def _file_rules(manifest: Manifest) -> Iterator[Rule]:
    target, draft = manifest.target, manifest.draft
    files = [segment.file for segment in target.segments] + [point.file for point in target.exits]
    files += [head.file for head in manifest.heads]
    files += [target.weights_file, draft.file, draft.weights_file]
    for index, file in enumerate(files):
        yield Rule(file not in files[:index], "file", file, "a file of its own for every stage")


def _table_rules(manifest: Manifest) -> Iterator[Rule]:
    """The rows that the host looks up for the draft, if it does, lie within a file of the target's."""
    table, width = manifest.draft.embedding, manifest.draft.shape.row_width
    yield _within("draft.shape.row_width", width, 0)
    if table is None:
        yield Rule(not width, "draft.embedding", None, "a table of tokens' rows, or draft.shape.row_width = 0")
        return
    yield _one_of("draft.embedding.file", table.file, (manifest.target.weights_file,))
    yield _within("draft.embedding.num_rows", table.num_rows, manifest.target.shape.vocab_size)
    yield _within("draft.embedding.width", table.width, max(width, 1), width)
    yield _one_of("draft.embedding.dtype", table.dtype, TARGET_DTYPES)
    yield Rule(table.bits in (0, 4, 8), "draft.embedding.bits", table.bits, "0, 4, 8")
    yield _within("draft.embedding.block_size", table.block_size, 8 if table.bits else 0)
    for name in ("offset", "scales_offset"):
        yield _within(f"draft.embedding.{name}", getattr(table, name), 0, _LARGEST_INT)
    size = manifest.files[table.file].bytes
    for name, end in table.ends().items():
        yield _within(f"draft.embedding: the end of its {name}", end, 1, size)


def _draft_rules(manifest: Manifest) -> Iterator[Rule]:
    draft, shape = manifest.draft, manifest.draft.shape
    yield _within("draft.source.num_parameters", draft.source.num_parameters, 1, _LARGEST_INT)
    yield from _sizes("draft.shape", shape, _DRAFT_SIZES)
    yield from _sizes("draft.shape", shape, ("num_streams", "num_noise_rows"), least=0)
    yield _within("draft.shape.vocab_size", shape.vocab_size, 1, manifest.target.shape.vocab_size)
    yield _within("draft.shape.num_candidates", shape.num_candidates, 1, shape.vocab_size)
    yield _one_of("draft.shape.dtype", shape.dtype, DRAFT_DTYPES)
    yield _one_of("draft.precision", draft.precision, (*PRECISIONS, *FOR_PROCESSORS))
    yield _within("draft.num_stream_layers", draft.num_stream_layers, 0, shape.num_layers)
    yield from _table_rules(manifest)
    yield Rule(bool(draft.buckets), "draft.buckets", [], "one bucket or more")
    for index, bucket in enumerate(draft.buckets):
        yield _within(f"draft.buckets[{index}].rows", bucket.rows, 1)
        yield _within(f"draft.buckets[{index}].tips", bucket.tips, 1, bucket.rows)
    capacities = draft.capacities
    is_rising = bool(capacities) and capacities[0] > 0 and all(one < other for one, other in pairwise(capacities))
    yield Rule(is_rising, "draft.capacities", list(capacities), "one or more, positive and rising")
    yield _within("draft.capacities: the largest", capacities[-1], manifest.target.context)


def _head_rules(manifest: Manifest) -> Iterator[Rule]:
    """There is one head of a kind, and every segment gives what heads read behind its layers."""
    target, heads = manifest.target, manifest.heads
    kinds = [head.kind for head in heads]
    for index, head in enumerate(heads):
        where, shape = f"heads[{index}]", head.shape
        yield Rule(head.kind not in kinds[:index], f"{where}.kind", head.kind, "one head of a kind")
        yield _one_of(f"{where}.kind", head.kind, names.HEAD_KINDS)
        yield _one_of(f"{where}.vocabulary", head.vocabulary, names.HEAD_VOCABULARIES)
        yield _within(f"{where}.source.num_parameters", head.source.num_parameters, 0, _LARGEST_INT)
        yield _within(f"{where}.num_tokens", head.num_tokens, 1, target.shape.vocab_size)
        yield Rule(head.read_share >= 0.0, f"{where}.read_share", head.read_share, "0 or more")
        yield _within(f"{where}.shape.length", shape.length, 1, MOST_GUESSES)
        yield _within(f"{where}.shape.num_candidates", shape.num_candidates, 1, head.num_tokens)
        yield Rule(bool(shape.taps), f"{where}.shape.taps", [], "one layer or more")
        for tap in shape.taps:
            yield _within(f"{where}.shape.taps", tap, 1, target.shape.num_layers + 1)
        yield from _sizes(
            f"{where}.shape", shape, ("num_layers", "num_kv_heads", "head_dim"), int(shape.num_layers > 0)
        )
    wanted = {tap for head in heads for tap in head.shape.taps}
    for index, segment in enumerate(target.segments):
        last = segment.end_layer + (segment is target.segments[-1])
        behind = sorted(tap for tap in wanted if segment.first_layer < tap <= last)
        found = list(segment.taps)
        yield Rule(found == behind, f"target.segments[{index}].taps", found, f"{behind}, which the heads read")


def _token_rules(manifest: Manifest) -> Iterator[Rule]:
    largest = manifest.target.shape.vocab_size - 1
    for index, token in enumerate(manifest.tokens.eos_ids):
        yield _within(f"tokens.eos_ids[{index}]", token, 0, largest)
    for name in ("bos_id", "pad_id"):
        token = getattr(manifest.tokens, name)
        if token is not None:
            yield _within(f"tokens.{name}", token, 0, largest)


def _report_rules(manifest: Manifest) -> Iterator[Rule]:
    """What was measured, what the checkpoint asks for, and how files are described."""
    for index, result in enumerate(manifest.verify):
        where = f"verify[{index}]"
        yield Rule(result.max_abs_error >= 0, f"{where}.max_abs_error", result.max_abs_error, "0 or more")
        yield _share(f"{where}.top1_agreement", result.top1_agreement)
        yield _within(f"{where}.positions", result.positions, 1)
    if (quality := manifest.quality) is not None:
        for name in ("perplexity", "reference_perplexity"):
            yield Rule(getattr(quality, name) > 0, f"quality.{name}", getattr(quality, name), "above 0")
        yield _share("quality.top1_agreement", quality.top1_agreement)
        yield _within("quality.positions", quality.positions, 1)
    if (accuracy := manifest.draft_accuracy) is not None:
        for index, share in enumerate(accuracy.agreement):
            yield _share(f"draft_accuracy.agreement[{index}]", share)
        for name in ("accepted_before", "accepted_after", "num_windows", "num_positions"):
            yield Rule(getattr(accuracy, name) >= 0, f"draft_accuracy.{name}", getattr(accuracy, name), "0 or more")
    if (length := manifest.accepted_length) is not None:
        yield Rule(length.accepted >= 0, "accepted_length.accepted", length.accepted, "0 or more")
        most = manifest.target.shape.vocab_size
        ids = [token for text in length.texts for token in text]
        yield Rule(all(0 <= token < most for token in ids), "accepted_length.texts", "another id", f"ids below {most}")
        longest = max(map(len, length.texts), default=0)
        room = max(manifest.draft.capacities, default=0)
        yield Rule(longest + 8 <= room or not longest, "accepted_length.texts", longest, f"at most {room - 8} tokens")
        windows = sum(max(0, len(text) - 1 - length.num_prompt) for text in length.texts)
        yield Rule(windows == length.num_windows, "accepted_length.num_windows", length.num_windows, str(windows))
    of_chat = {} if manifest.chat is None else manifest.chat.generation
    for where, settings in (("generation", manifest.generation), ("chat.generation", of_chat)):
        for name, value in settings.items():
            yield Rule(_is_setting(value), f"{where}.{name}", value, "a number, or true or false")
    for name, entry in manifest.files.items():
        yield _within(f"files[{name!r}].bytes", entry.bytes, 0, _LARGEST_INT)
        is_digest = fullmatch("[0-9a-f]{64}", entry.sha256) is not None
        yield Rule(is_digest, f"files[{name!r}].sha256", entry.sha256, "64 hexadecimal digits")


def _is_setting(value: Any) -> bool:
    return isinstance(value, bool | int | float)
