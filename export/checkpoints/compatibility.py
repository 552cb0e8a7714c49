"""Can this draft speak for this target? Checked on the small files alone, before any weights are read.

Owns: comparing tokenizers, vocabulary sizes and special tokens. Does not own: masking the ids that one side lacks.
"""

from dataclasses import replace
from typing import Any

from mirrorsd.export.checkpoints.checkpoint import Checkpoint, read_json
from mirrorsd.families.low_rank_head import EMBEDDING, SHARES_EMBEDDING
from mirrorsd.graphs.errors import ExportError

VOCABULARY_TOLERANCE = 128


def check_compatible(target: Checkpoint, draft: Checkpoint) -> None:
    """Check that both checkpoints mean the same by the same token ids.

    Raises:
        ExportError: they do not; the message says what differs.
    """
    _check_tokenizers(target, draft)
    sizes = [int(checkpoint.config["vocab_size"]) for checkpoint in (target, draft)]
    if abs(sizes[0] - sizes[1]) > VOCABULARY_TOLERANCE:
        raise _refusal(
            f"the target has {sizes[0]} token ids, the draft {sizes[1]}; "
            f"up to {VOCABULARY_TOLERANCE} ids of padding may differ"
        )
    ends = set(target.eos_ids), set(draft.eos_ids)
    if ends[0] != ends[1] and not ends[0] & ends[1]:
        raise _refusal(f"the target ends a text with ids {list(target.eos_ids)}, the draft with {list(draft.eos_ids)}")
    begins = [checkpoint.token_id("bos_token_id") for checkpoint in (target, draft)]
    if None not in begins and begins[0] != begins[1]:
        raise _refusal(f"the target begins a text with id {begins[0]}, the draft with {begins[1]}")


def with_shared_embedding(draft: Checkpoint, target: Checkpoint) -> Checkpoint:
    """The draft with the target's token embedding, where its config says that it shares it.

    Raises:
        ExportError: the target has none of that name or of that width.
    """
    if not draft.config.get(SHARES_EMBEDDING):
        return draft
    found = target.tensors.get(EMBEDDING)
    wanted = (int(draft.config["vocab_size"]), int(draft.config["hidden_size"]))
    if found is None or found.shape != wanted:
        there = "none of that name" if found is None else f"one of shape {found.shape}"
        raise ExportError(
            f"the draft {draft.folder} shares its target's token embedding {EMBEDDING!r} of shape {wanted}; the target "
            f"{target.path} has {there}: it was trained for another target"
        )
    return replace(draft, tensors={**draft.tensors, EMBEDDING: found})


def _refusal(difference: str) -> ExportError:
    return ExportError(f"draft and target do not fit together: {difference}. Choose a draft made for this target")


def _check_tokenizers(target: Checkpoint, draft: Checkpoint) -> None:
    of_target, of_draft = (
        read_json(checkpoint.folder / "tokenizer.json", checkpoint.role) for checkpoint in (target, draft)
    )
    if of_target == of_draft:
        return
    for checkpoint, document in ((target, of_target), (draft, of_draft)):
        if not isinstance(document.get("model"), dict):
            raise ExportError(
                f"{checkpoint.folder / 'tokenizer.json'} holds no tokenizer: its field 'model' is "
                f"{document.get('model')!r}; expected an object with the tokenizer's type and vocabulary"
            )
    kinds = [document["model"].get("type") for document in (of_target, of_draft)]
    if kinds[0] != kinds[1]:
        raise _refusal(f"the target's tokenizer is of type {kinds[0]}, the draft's of type {kinds[1]}")
    words = _words(of_target), _words(of_draft)  # some files have special tokens in the vocabulary, others beside it
    _check_entries(_with_rows(target, *words), _with_rows(draft, *reversed(words)))
    if _merges(of_target) != _merges(of_draft):
        raise _refusal("their tokenizers have the same vocabulary but different merges")


def _check_entries(of_target: dict[str, Any], of_draft: dict[str, Any]) -> None:
    differing = [word for word in of_target | of_draft if of_target.get(word) != of_draft.get(word)]
    if differing:
        first = min(differing, key=lambda word: (str(of_target.get(word)), word))
        raise _refusal(
            f"the vocabularies of their tokenizers differ in {len(differing)} entries, for example {first!r}: "
            f"target {of_target.get(first, 'none')}, draft {of_draft.get(first, 'none')}"
        )


def _words(document: dict[str, Any]) -> dict[str, Any]:
    """Piece -> id, added tokens among them; Unigram tokenizers list [piece, score] in the order of ids."""
    vocabulary = document["model"].get("vocab", {})
    if isinstance(vocabulary, list):
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in document.get("added_tokens") or []}}


def _with_rows(checkpoint: Checkpoint, words: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Leave tokens out that the model has no row for, and that the other side does not know: no prompt may hold one."""
    size = int(checkpoint.config["vocab_size"])
    return {text: token for text, token in words.items() if token < size or text in others}


def _merges(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Merges as pairs; older files write "a b", newer ones ["a", "b"]."""
    merges = document["model"].get("merges") or []
    return [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in merges]
