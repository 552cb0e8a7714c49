"""What every `mirrorsd train` command begins with: a checked target that fits into memory, and text that it wrote."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mirrorsd.cli.output.console import note
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.text import HELD_BACK_FOLDER, TEXT_FOLDER

if TYPE_CHECKING:
    from mirrorsd.export.checkpoints.checkpoint import Checkpoint
    from mirrorsd.training.text.corpus import Document
    from mirrorsd.training.text.self_text import SelfText
    from mirrorsd.training.text.token_stream import TokenStream

Target = Annotated[Path, typer.Argument(help="The target: a Hugging Face folder or a GGUF file.", show_default=False)]
Corpus = Annotated[
    Path | None,
    typer.Option(help="Documents to cut prompts from: .txt, one per line, or .jsonl.", show_default=False),
]
HeldBack = Annotated[
    Path | None, typer.Option(help="Documents never trained on; without it, one in fifty of --corpus.")
]
Texts = Annotated[int, typer.Option(min=0, help="Texts that the target writes; 0: none but the held-back ones.")]
Work = Annotated[Path, typer.Option(help="Folder for text, checkpoints and curves.", show_default=False)]
ArgmaxWeight = Annotated[
    float,
    typer.Option(min=0, max=1, help="Share of the loss that asks for the target's best token, not for its chances."),
]
StreamsFrom = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the training after which the streams join the main rows.")
]
TipShare = Annotated[float, typer.Option(min=0, max=1, help="Share of the rows that carry streams in a step.")]
PromptWeight = Annotated[
    float, typer.Option(min=0, max=1, help="Weight of prompts and documents; what the target wrote has 1.")
]
DocumentShare = Annotated[float, typer.Option(min=0, max=1, help="Share of each batch that is --corpus as it is.")]
Batch = Annotated[int, typer.Option(min=1, help="Texts per step of training.")]
Length = Annotated[int, typer.Option(min=1, help="Tokens of each.")]
Seconds = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds of training alone: the target's writing before it and the measuring behind it come on top."
    ),
]
SaveEvery = Annotated[float, typer.Option(min=0, help="Seconds of training between checkpoints.")]
ReportEvery = Annotated[int, typer.Option(min=1, help="Steps between rows of losses.csv.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the training in --work.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads; 0 leaves it to PyTorch.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto (CUDA where there is some), cuda, cpu.")]
CountCpu = Annotated[bool, typer.Option("--count-cpu", help="Count seconds of a core: fair where others compute too.")]
Deadline = Annotated[
    float | None, typer.Option(help="Be done at this time (seconds since 1970), whatever pauses there were.")
]

_FOLDERS = (TEXT_FOLDER, HELD_BACK_FOLDER)
_HELD_BACK_TEXTS = 400
_HELD_BACK_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Where prompts come from and how many; without a corpus, the text must be in the work folder already.

    `more` are other work folders, whose text is read too.
    """

    corpus: Path | None
    held_back: Path | None
    count: int
    part: tuple[int, int] = (0, 1)
    longest_prompt: int | None = None
    more: tuple[Path, ...] = ()


def open_target(path: Path, *, trained: int, tokens: int, threads: int = 0, device: str = "cpu") -> "Checkpoint":
    """Check a target, a folder or a GGUF file, and that training beside it fits into memory, before anything is loaded.

    Raises:
        ExportError: not a complete checkpoint of a supported family.
        ConfigError: too little memory.
    """
    from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
    from mirrorsd.machine.doctor.memory import SYSTEM, free_memory
    from mirrorsd.training.run.device import use_device
    from mirrorsd.training.run.memory_need import check_memory
    from mirrorsd.training.run.timed_run import use_threads

    checkpoint = open_checkpoint(path, "target")
    needed = _needed_memory(checkpoint, trained, tokens)
    check_memory(f"training for the target {path}", needed, free_memory(SYSTEM))
    use_threads(threads)
    use_device(device)
    return checkpoint


def _needed_memory(checkpoint: "Checkpoint", trained: int, tokens: int) -> int:
    from mirrorsd.training.run.memory_need import training_bytes

    return training_bytes(
        fixed=checkpoint.source.num_parameters,
        trained=trained,
        tokens=tokens,
        vocab_size=int(checkpoint.config["vocab_size"]),
    )


def spare_memory(checkpoint: "Checkpoint", *, trained: int, tokens: int) -> int:
    """Half of the bytes that a training leaves free, before the target is loaded; 0 where nobody knows."""
    from mirrorsd.machine.doctor.memory import SYSTEM, free_memory

    return max((free_memory(SYSTEM) or 0) - _needed_memory(checkpoint, trained, tokens), 0) // 2


def load_target(checkpoint: "Checkpoint") -> Any:
    """Load a target, frozen, in single precision, attending by the rules of its family, to where training computes."""
    from mirrorsd.training.models.attention import use_training_attention
    from mirrorsd.training.models.whole_model import load_whole
    from mirrorsd.training.run.device import to_device

    model = to_device(load_whole(checkpoint.path))
    model.requires_grad_(False)
    use_training_attention(model)
    return model


def check_text(
    work: Path,
    source: TextSource,
    batch: tuple[int, int],
    document_share: float,
    seconds: float,
    checkpoint: "Checkpoint",
) -> None:
    """Refuse text that cannot be had, or is too little for one step, before the target writes any; then say what comes.

    Args:
        work: The folder that the target writes into.
        source: What it writes.
        batch: Texts of a step, and tokens of each.
        document_share: The share of a step that is documents.
        seconds: Of training.
        checkpoint: The target.

    Raises:
        ConfigError: A corpus with bad lines, no corpus and no text, text of another target, or too few tokens.
    """
    only_held_back = document_share == 1 or not source.count
    if source.corpus is not None:
        _read_corpus(source.corpus, source.held_back)
    else:
        if source.held_back is not None:
            raise ConfigError("--held-back does nothing without --corpus here. Give that, too, or leave it out.")
        needed = (HELD_BACK_FOLDER,) if only_held_back else _FOLDERS
        missing = [name for name in needed if not _has_text(work / name)]
        if missing:
            raise ConfigError(
                f"{work / missing[0]} holds no text of the target; give --corpus, so that it can write some"
            )
    for folder in source.more:
        if not _has_text(folder / TEXT_FOLDER):
            raise ConfigError(
                f"--more-text {folder}: {folder / TEXT_FOLDER} holds no text; give a --work of `train text`"
            )
    for folder in (work / TEXT_FOLDER, work / HELD_BACK_FOLDER, *(folder / TEXT_FOLDER for folder in source.more)):
        _check_tokens(folder, int(checkpoint.config["vocab_size"]))
    _check_amount(work, source, batch, document_share, only_held_back=only_held_back)
    writes = f"the target writes up to {source.count} texts into {work}, then " if source.corpus is not None else ""
    note(f"{writes}{seconds:.0f} s of training (--seconds), then measuring on held-back text")


def _check_tokens(folder: Path, vocab_size: int) -> None:
    from mirrorsd.training.text.text_folder import load_texts

    most = max((max(text.tokens, default=0) for text in load_texts(folder)), default=0) if _has_text(folder) else 0
    if most >= vocab_size:
        raise ConfigError(
            f"{folder} holds text of another target: it has token {most}, and this target has {vocab_size} tokens; "
            "give text that this one wrote"
        )


def _check_amount(
    work: Path, source: TextSource, batch: tuple[int, int], document_share: float, *, only_held_back: bool
) -> None:
    from mirrorsd.training.text.self_prompts import PromptRules
    from mirrorsd.training.text.self_text import SelfTextConfig

    sequences, length = batch
    sequences -= round(document_share * sequences)
    if not sequences:
        return
    if only_held_back and not source.more and not _has_text(work / TEXT_FOLDER):
        raise ConfigError(
            "--texts is 0, so that there is no text of the target: give more, --more-text, or documents alone"
        )
    most = sum(map(_num_tokens, (folder / TEXT_FOLDER for folder in (work, *source.more))))
    if source.corpus is not None and not only_held_back:
        longest = source.longest_prompt or PromptRules().longest
        most += source.count * (longest + SelfTextConfig(ends=()).max_new_tokens)
    if most < sequences * length + 1:
        raise ConfigError(
            f"--batch {batch[0]} with --length {length} needs {sequences * length + 1} tokens of the target's for a "
            f"step; its text will have {most} at most: give more --texts, a smaller --batch or a smaller --length"
        )


def _has_text(folder: Path) -> bool:
    return next(folder.glob("batch_*.npz"), None) is not None


def _num_tokens(folder: Path) -> int:
    """Tokens of what lies in a folder already."""
    from mirrorsd.training.text.text_folder import load_texts

    return sum(len(text.tokens) for text in load_texts(folder)) if _has_text(folder) else 0


def prepare_texts(
    target: Any, checkpoint: "Checkpoint", work: Path, source: TextSource, *, only_held_back: bool = False
) -> None:
    """Let the target write what is missing of its training and held-back text.

    `only_held_back` is for a training on documents alone; a count of 0 says the same.

    Raises:
        ConfigError: a corpus with bad lines, or text in the folder that was made otherwise.
    """
    only_held_back = only_held_back or not source.count
    if source.corpus is None:
        return
    from mirrorsd.training.text.self_text import SelfTextConfig

    documents, held_back = _read_corpus(source.corpus, source.held_back)
    ends = checkpoint.eos_ids
    written = SelfTextConfig(ends=ends, batch=128)
    held = SelfTextConfig(ends=ends, max_new_tokens=_HELD_BACK_TOKENS, temperatures=(0.0,))
    how = (source.part, source.longest_prompt)
    num_held_back = min(_HELD_BACK_TEXTS, source.count or _HELD_BACK_TEXTS)
    _write(target, checkpoint, (held_back, work / HELD_BACK_FOLDER, num_held_back, held), how)  # of few: fails at once
    if not only_held_back:
        _write(target, checkpoint, (documents, work / TEXT_FOLDER, source.count, written), how)


def open_documents(checkpoint: "Checkpoint", source: TextSource) -> "TokenStream":
    """The documents of the corpus that may be trained on, as they are.

    Raises:
        ConfigError: no corpus, or one with bad lines.
    """
    from mirrorsd.training.text.document_text import document_tokens
    from mirrorsd.training.text.self_prompts import load_tokenizer
    from mirrorsd.training.text.token_stream import TokenStream

    if source.corpus is None:
        raise ConfigError("--document-share trains on documents too; give --corpus, where they are")
    documents, _ = _read_corpus(source.corpus, source.held_back)
    tokens = document_tokens(documents, load_tokenizer(checkpoint.folder), checkpoint.eos_ids[0])
    return TokenStream(tokens, own=False)


def _read_corpus(corpus: Path, held_back: Path | None) -> "tuple[list[Document], list[Document]]":
    """Documents to train on, and those that are held back."""
    from mirrorsd.training.text.corpus import read_documents, split_held_back

    documents = read_documents(corpus)
    return split_held_back(documents) if held_back is None else (documents, read_documents(held_back))


def _write(
    target: Any, checkpoint: "Checkpoint", job: tuple[Any, Path, int, Any], how: tuple[tuple[int, int], int | None]
) -> None:
    from mirrorsd.cli.output.console import show_share
    from mirrorsd.training.text.self_prompts import PromptRules, cut_prompts, load_tokenizer
    from mirrorsd.training.text.text_folder import write_self_text

    (documents, folder, count, config), (part, longest) = job, how
    rules = PromptRules() if longest is None else PromptRules(longest=longest)
    prompts = cut_prompts(documents, load_tokenizer(checkpoint.folder), count, seed=20, rules=rules)
    with show_share(f"writing {folder.name}") as show:
        write_self_text(target, prompts, folder, config, part, show)


def held_back_texts(work: Path) -> "list[SelfText]":
    """The held-back greedy texts, each cut before it begins to repeat itself."""
    from mirrorsd.training.text.self_text import cut_before_loop
    from mirrorsd.training.text.text_folder import load_texts

    return [cut_before_loop(text) for text in load_texts(work / HELD_BACK_FOLDER) if text.temperature == 0]


def check_fresh(*folders: Path, resume: bool) -> None:
    """Refuse to go on with a training that nobody asked to go on with.

    Raises:
        ConfigError: there is one, and `--resume` was not given.
    """
    begun = [folder for folder in folders if (folder / "last.pt").is_file()]
    if begun and not resume:
        raise ConfigError(f"{begun[0]} holds a training already; add --resume to go on with it, or give another --work")


def note_text(work: Path) -> None:
    """Say how much text there is, if any."""
    from mirrorsd.training.text.text_folder import load_texts

    texts, held_back = (load_texts(work / name) if _has_text(work / name) else [] for name in _FOLDERS)
    num_tokens = sum(len(text.tokens) for text in texts)
    note(
        f"{len(texts)} texts, {num_tokens / 1e6:.2f} M tokens written by the target, and {len(held_back)} texts held "
        "back"
    )
