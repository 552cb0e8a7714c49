"""A manifest whose values cannot be: refused with the field, what was found and what is allowed, and nothing worse."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import describe_file, read_bundle
from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import DraftAccuracy, Head, Manifest, QualityEntry, WeightStorage, with_checksum

HOSTILE = (
    -5,
    0,
    10**12,
    2**70,
    10**400,
    float("nan"),
    float("inf"),
    "",
    [],
    {},
    None,
    "float99",
    "\0",
    "a" * 5000,
    "../x",
    True,
)
Place = tuple[str | int, ...]


@pytest.fixture
def whole_bundle(bundle: Path) -> Path:
    """The tiny bundle with every optional part of a manifest."""
    manifest = read_bundle(bundle)
    storage = WeightStorage(
        layers="int8", head="int8", embedding="fp32", block_size=32, is_symmetric=True, rounding="nearest"
    )
    (bundle / "target/head-eagle3.onnx").write_bytes(b"a head")
    head = Head(
        kind="eagle3",
        file="target/head-eagle3.onnx",
        source=replace(manifest.draft.source, name="tiny-head"),
        shape=HeadShape(taps=(1, 3), length=4, num_candidates=2, num_layers=1, num_kv_heads=1, head_dim=4),
        vocabulary="reduced",
        num_tokens=20,
    )
    prefix, suffix = manifest.target.segments
    segments = (replace(prefix, taps=(1,)), replace(suffix, taps=(3,)))
    whole = replace(
        manifest,
        target=replace(manifest.target, storage=storage, spare_rows=7, row_group=2, segments=segments),
        heads=(head,),
        files={**manifest.files, head.file: describe_file(bundle / head.file)},
        tokens=replace(manifest.tokens, bos_id=1, pad_id=2),
        draft_accuracy=DraftAccuracy(
            scheme="int8", agreement=(0.9,), accepted_before=2.0, accepted_after=1.9, num_windows=9, num_positions=9
        ),
        quality=QualityEntry(
            text="given", positions=9, perplexity=12.0, reference_perplexity=11.0, top1_agreement=0.95
        ),
        exit_coverage={"positions": 9, "layers": {"1": {"adapter": {"1": 0.5}}}},
        generation={"do_sample": True, "temperature": 0.6, "top_k": 20},
    )
    (bundle / names.MANIFEST_FILE).write_text(whole.to_json(), encoding="utf-8")
    return bundle


def document_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / names.MANIFEST_FILE).read_text(encoding="utf-8"))
    return found


def places(value: Any, before: Place = ()) -> Iterator[Place]:
    """Every field of a document: leaves, lists and objects."""
    if before:
        yield before
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*before, key))


def edit(document: dict[str, Any], place: Place, value: object) -> None:
    inner: Any = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value


def read_edited(folder: Path, place: Place, value: object) -> Manifest:
    """The bundle with one field replaced, under the right checksum: only the values can tell."""
    document = document_of(folder)
    edit(document, place, value)
    (folder / names.MANIFEST_FILE).write_text(json.dumps(with_checksum(document)), encoding="utf-8")
    return read_bundle(folder)


def test_any_field_with_any_hostile_value_is_read_as_it_is_or_refused(whole_bundle: Path) -> None:
    path = whole_bundle / names.MANIFEST_FILE
    before = path.read_text(encoding="utf-8")
    fields = [place for place in places(json.loads(before)) if place[0] != "checksum"]
    refused = 0
    for place in fields:
        for value in HOSTILE:
            path.write_text(before, encoding="utf-8")
            try:
                manifest = read_edited(whole_bundle, place, value)
            except BundleError as error:
                refused += 1
                assert len(str(error)) < 6500
                continue
            expected = json.loads(before)
            edit(expected, place, value)
            assert json.loads(json.dumps(asdict(manifest))) == {k: v for k, v in expected.items() if k != "checksum"}
    assert len(fields) > 100
    assert refused > 0.7 * len(fields) * len(HOSTILE)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("target", "context"), -5, "target.context is -5; allowed: 1 to 2147483647"),
        (("target", "context"), 10**12, "target.context is 1000000000000; allowed: 1 to"),
        (("target", "context"), 65, "draft.capacities: the largest is 64; allowed: 65 to"),
        (("target", "row_group"), 0, "target.row_group is 0; allowed: 1 to 64"),
        (
            ("target", "shape", "dtype"),
            "float99",
            "target.shape.dtype is 'float99'; allowed: float32, float16, bfloat16",
        ),
        (("target", "shape", "num_experts"), -1, "target.shape.num_experts is -1; allowed: 0 to"),
        (("target", "shape", "num_active"), 1, "target.shape.num_active is 1; allowed: 0 to 0"),
        (("target", "precision"), "fp99", "target.precision is 'fp99'; allowed: fp32, "),
        (("target", "segments"), [], r"target.segments is \[\]; allowed: one segment or more"),
        (("target", "segments", 1, "first_layer"), 0, r"target.segments\[1\].first_layer is 0; allowed: 1, where"),
        (("target", "segments", 1, "end_layer"), 3, r"target.segments\[1\].end_layer is 3; allowed: 2 to 2"),
        (("target", "shape", "num_layers"), 3, r"target.segments\[1\].end_layer is 2; allowed: 3 to 3"),
        (("target", "exits", 0, "layer"), 2, r"target.exits: layers is \[2\]; allowed: \[1\], the segments' borders"),
        (("target", "exits"), [], r"target.exits: layers is \[\]; allowed: \[1\]"),
        (("target", "exits", 0, "file"), "target/suffix.onnx", "a file of its own for every stage"),
        (("target", "exits", 0, "num_candidates"), 33, "num_candidates is 33; allowed: 1 to 32"),
        (("draft", "buckets"), [], "draft.buckets is .*one bucket or more"),
        (("draft", "buckets", 0, "tips"), 9, r"draft.buckets\[0\].tips is 9; allowed: 1 to 8"),
        (("draft", "capacities"), [], r"draft.capacities is \[\]; allowed: one or more"),
        (("draft", "capacities"), [64, 64], r"draft.capacities is \[64, 64\]; allowed: .*rising"),
        (("draft", "shape", "vocab_size"), 33, "draft.shape.vocab_size is 33; allowed: 1 to 32"),
        (("tokens", "eos_ids"), [32], r"tokens.eos_ids\[0\] is 32; allowed: 0 to 31"),
        (("verify", 0, "top1_agreement"), 1.5, r"verify\[0\].top1_agreement is 1.5; allowed: 0 to 1"),
        (("verify", 0, "max_abs_error"), float("nan"), r"verify\[0\].max_abs_error is nan; allowed: finite"),
        (("generation",), {"temperature": "hot"}, "generation.temperature is 'hot'; allowed: a number"),
        (("files", "target/weights.bin", "sha256"), "0", "sha256 is '0'; allowed: 64 hexadecimal digits"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_is_allowed(
    bundle: Path, place: Place, value: object, words: str
) -> None:
    with pytest.raises(BundleError, match=f"manifest.json: .*{words}.*Export the bundle again"):
        read_edited(bundle, place, value)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (
            ("heads", 0, "kind"),
            "oracle",
            r"heads\[0\].kind is 'oracle'; allowed: medusa, hydra, eagle3, block, streaming",
        ),
        (("heads", 0, "shape", "taps"), [1, 4], r"heads\[0\].shape.taps is 4; allowed: 1 to 3"),
        (("heads", 0, "shape", "taps"), [], r"heads\[0\].shape.taps is \[\]; allowed: one layer or more"),
        (("heads", 0, "shape", "length"), 32, r"heads\[0\].shape.length is 32; allowed: 1 to 31"),
        (("heads", 0, "shape", "num_candidates"), 21, "num_candidates is 21; allowed: 1 to 20"),
        (("heads", 0, "file"), "target/suffix.onnx", "a file of its own for every stage"),
        (("target", "segments", 1, "taps"), [2], r"segments\[1\].taps is \[2\]; allowed: \[3\], which the heads read"),
        (("heads",), [], r"segments\[0\].taps is \[1\]; allowed: \[\], which the heads read"),
    ],
)
def test_a_head_that_cannot_be_is_named(whole_bundle: Path, place: Place, value: object, words: str) -> None:
    with pytest.raises(BundleError, match=f"manifest.json: .*{words}"):
        read_edited(whole_bundle, place, value)


def test_an_edited_manifest_is_refused_even_if_its_values_could_be(bundle: Path) -> None:
    path = bundle / names.MANIFEST_FILE
    document = document_of(bundle)
    document["tokens"]["eos_ids"] = [3]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(
        BundleError, match=r"was changed after its export: it says checksum '[0-9a-f]{12}', its content"
    ):
        read_bundle(bundle)
    del document["checksum"]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BundleError, match="was changed after its export: it says checksum 'None'"):
        read_bundle(bundle)


def test_the_checksum_is_of_the_content_not_of_its_layout(bundle: Path) -> None:
    path = bundle / names.MANIFEST_FILE
    expected = read_bundle(bundle)
    path.write_text(json.dumps(document_of(bundle), sort_keys=True), encoding="utf-8")
    assert read_bundle(bundle) == expected


@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"schema": {"9" * 5000}}}'])
def test_json_that_python_cannot_read_is_a_bundle_error(bundle: Path, text: str) -> None:
    (bundle / names.MANIFEST_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(BundleError, match="is not valid JSON"):
        read_bundle(bundle)
