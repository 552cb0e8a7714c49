"""`mirrorsd train text`: let the target write, in one or several processes."""

from pathlib import Path
from typing import Annotated

import typer

from mirrorsd.cli.commands.train import target as shared
from mirrorsd.graphs.errors import ConfigError

_BATCH_TOKENS = 128

LongestPrompt = Annotated[
    int | None,
    typer.Option(min=8, help="Most tokens of a prompt; longer ones are left out. Without it: 300.", show_default=False),
]


def text(
    target: shared.Target,
    corpus: Annotated[Path, typer.Option(help="Documents to cut prompts from.", show_default=False)],
    work: shared.Work,
    held_back: shared.HeldBack = None,
    texts: shared.Texts = 9000,
    longest_prompt: LongestPrompt = None,
    part: Annotated[str, typer.Option(help="K/N: this process writes the K-th (from 0) of N parts.")] = "0/1",
    threads: shared.Threads = 1,
    device: shared.Device = "auto",
) -> None:
    """Let the target write its training and held-back text; `train exit` and `train draft` do it themselves if need be.

    One process per core is faster than one process with several threads.
    """
    place = read_part(part)
    checkpoint = shared.open_target(target, trained=0, tokens=_BATCH_TOKENS, threads=threads, device=device)
    model = shared.load_target(checkpoint)
    source = shared.TextSource(
        corpus=corpus, held_back=held_back, count=texts, part=place, longest_prompt=longest_prompt
    )
    shared.prepare_texts(model, checkpoint, work, source)
    shared.note_text(work)


def read_part(text: str) -> tuple[int, int]:
    """Read `0/2` as (0, 2).

    Raises:
        ConfigError: anything else.
    """
    number, _, count = text.partition("/")
    if number.isdigit() and count.isdigit() and int(number) < int(count):
        return int(number), int(count)
    raise ConfigError(f"--part is {text!r}; expected K/N with K below N, for example 0/2 and 1/2")
