"""The card of a packed bundle: what it is made of, under which licences, and what was measured at its export.

Owns: the words and the hub's front matter. Does not own: the figures (the manifest), the words for one of them
(`inspect`, `compile`).
"""

import json
import re
from collections.abc import Iterator

from mirrorsd.cli.commands.compile import accuracy_line
from mirrorsd.cli.commands.inspect import precision_line, quality_line
from mirrorsd.graphs import names
from mirrorsd.graphs.manifest import Manifest, SourceModel
from mirrorsd.graphs.quality_bounds import warnings_of
from mirrorsd.hub.asking import REPOSITORY, readable_bytes
from mirrorsd.hub.packing import PLACEHOLDER, TAG

UNKNOWN = "unknown"
_LICENCES = "licences/"


def card_text(manifest: Manifest, name: str) -> str:
    """The README of a bundle, in Markdown, for people and for the hub."""
    target, draft = manifest.target.source, manifest.draft.source
    size = readable_bytes(sum(entry.bytes for entry in manifest.files.values()))
    lines = (
        *_front_matter(manifest),
        f"# {name}",
        "",
        f"{target.name} and a smaller model, {draft.name}, that drafts for it, ready to run on an ordinary PC with "
        "[mirrorsd](https://pypi.org/project/mirrorsd/). The draft changes how fast texts come, and no token of them.",
        "",
        "```",
        'pip install "mirrorsd[cpu,cli]"',
        f"mirrorsd chat {PLACEHOLDER}",
        "```",
        "",
        "## What is in it",
        "",
        "| | target | draft |",
        "|---|---|---|",
        *_rows(manifest),
        "",
        f"{size} on disk. `manifest.json` has the SHA-256 of every file; they are checked when the bundle is loaded.",
        "",
        "## Figures",
        "",
        *(f"* {line}" for line in _figures(manifest)),
        "",
        "How fast it is depends on the machine: `mirrorsd compare` measures it there.",
        "",
        "## Licences",
        "",
        *_licences(manifest),
        "",
        "Made with " + ", ".join(f"{package} {version}" for package, version in manifest.versions.items()) + ".",
    )
    return "\n".join(lines) + "\n"


def licence_of(manifest: Manifest) -> str:
    """The licence of the whole: that of both models; "other" where they differ, "unknown" where one does not say."""
    found = {source.licence.lower() for source in sources_of(manifest)}
    if UNKNOWN in found:
        return UNKNOWN
    return found.pop() if len(found) == 1 else "other"


def sources_of(manifest: Manifest) -> tuple[SourceModel, ...]:
    """All models in a bundle, the target first."""
    return (manifest.target.source, manifest.draft.source, *(head.source for head in manifest.heads))


def _front_matter(manifest: Manifest) -> Iterator[str]:
    """What the hub reads; JSON's strings are YAML's, so no name can end the matter."""
    bases = [source.name for source in sources_of(manifest) if re.fullmatch(REPOSITORY, source.name)]
    licence = licence_of(manifest)
    yield "---"
    yield f"license: {json.dumps('other' if licence == UNKNOWN else licence)}"
    if bases:
        yield "base_model:"
        yield from (f"- {json.dumps(name)}" for name in dict.fromkeys(bases))
        yield "base_model_relation: quantized"
    yield f"library_name: {TAG}"
    yield "pipeline_tag: text-generation"
    yield "tags:"
    yield from (f"- {tag}" for tag in (TAG, "speculative-decoding", "onnx", "openvino"))
    yield "---"


def _rows(manifest: Manifest) -> Iterator[str]:
    target, draft = manifest.target, manifest.draft
    rows = (
        ("model", target.source.name, draft.source.name),
        ("revision", target.source.revision or "-", draft.source.revision or "-"),
        ("family", target.source.family, draft.source.family),
        ("parameters", f"{target.source.num_parameters:,}", f"{draft.source.num_parameters:,}"),
        ("precision", precision_line(target), draft.precision),
        ("longest text", f"{target.context:,} tokens", ""),
        ("licence", target.source.licence, draft.source.licence),
    )
    yield from (f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)
    for head in manifest.heads:
        yield f"| {_cell(head.kind)} head | {_cell(head.source.name)} ({_cell(head.source.licence)}) | |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _figures(manifest: Manifest) -> Iterator[str]:
    if manifest.quality is not None:
        yield f"the target against its fp32 model: {quality_line(manifest.quality)}"
    if manifest.draft_accuracy is not None:
        yield accuracy_line(manifest.draft_accuracy)
    if (length := manifest.accepted_length) is not None:
        texts = f"{length.num_windows} windows of {len(length.texts)} texts that the target wrote"
        yield f"the draft guesses {length.accepted:.2f} tokens of a window ({texts})"
    for result in manifest.verify:
        yield (
            f"{result.stage} against PyTorch: largest error {result.max_abs_error:.1e}, same best token at "
            f"{result.top1_agreement:.1%} of {result.positions} positions"
        )
    yield from (f"warning: {warning}" for warning in warnings_of(manifest))


def _licences(manifest: Manifest) -> Iterator[str]:
    for source in sources_of(manifest):
        said = "does not say under which licence it is" if source.licence == UNKNOWN else f"is under {source.licence}"
        yield f"* {source.name} {said}"
    texts = [name for name in manifest.files if name.startswith(_LICENCES)]
    if texts:
        yield ""
        yield f"Their texts are in {', '.join(f'`{name}`' for name in texts)}."
    yield ""
    yield f"`{names.MANIFEST_FILE}` has where each of them came from."
