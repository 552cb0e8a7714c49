"""`mirrorsd train head`: a drafting head that reads the hidden states of its target, trained on text by that target."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mirrorsd.cli.commands.train import target as shared
from mirrorsd.cli.commands.train.draft import check_output, open_target_and_text, run_config
from mirrorsd.cli.commands.train.report import print_head_report
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import note, print_json, training_bar
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.names import TRAINED_HEADS
from mirrorsd.training.text import HELD_BACK_FOLDER

if TYPE_CHECKING:
    from mirrorsd.training.divergence import LossMix
    from mirrorsd.training.heads.head_shape import HeadPlan
    from mirrorsd.training.heads.head_training import HeadTrainingConfig

SHAPE, LOSS = "Shape", "Loss"
_REPORTED_TEXTS = 40
_SAMPLED_TEXTS = 24
_NEW_TOKENS = 128

Kind = Annotated[str, typer.Option(help=f"One of {', '.join(TRAINED_HEADS)}.", show_default=False)]
Taps = Annotated[
    str | None,
    typer.Option(help="What is read, such as 2,15,27 (layers passed) or final.", rich_help_panel=SHAPE),
]
Guesses = Annotated[int, typer.Option("--guesses", min=0, help="Guesses; 0: the kind's.", rich_help_panel=SHAPE)]
VocabularyKind = Annotated[
    str, typer.Option("--vocabulary", help="shared, own, low-rank or reduced.", rich_help_panel=SHAPE)
]
HeadRank = Annotated[int, typer.Option(min=1, help="Rank of a low-rank vocabulary.", rich_help_panel=SHAPE)]
NumLogits = Annotated[int, typer.Option("--tokens", min=1, help="Tokens of a reduced one.", rich_help_panel=SHAPE)]
Depth = Annotated[int, typer.Option(min=1, help="Residual blocks of each Medusa or Hydra head.", rich_help_panel=SHAPE)]
Layers = Annotated[
    int | None,
    typer.Option(min=0, help="Decoder layers; 1: Hydra's prefix layer. Default: the kind's.", rich_help_panel=SHAPE),
]
LinkRank = Annotated[
    int, typer.Option(min=-1, help="Units of a block's link; 0: none, -1: 128.", rich_help_panel=SHAPE)
]
AdapterRank = Annotated[int, typer.Option(min=1, help="Hidden units of streams' adapters.", rich_help_panel=SHAPE)]
Loss = Annotated[
    str | None,
    typer.Option(help="Shares of kl, tv and hard, such as tv=0.9,hard=0.1; default: the kind's.", rich_help_panel=LOSS),
]
Decay = Annotated[float, typer.Option(min=0, max=1, help="Guess k counts its k-th power.", rich_help_panel=LOSS)]
RowShare = Annotated[float, typer.Option(min=0, max=1, help="Share of rows that guess.", rich_help_panel=LOSS)]
Rate = Annotated[float, typer.Option(min=0, help="Peak learning rate, as a share of the usual.", rich_help_panel=LOSS)]


def head(
    context: typer.Context,
    target: shared.Target,
    output: Annotated[Path, typer.Option("-o", "--output", help="The head's folder.", show_default=False)],
    work: shared.Work,
    kind: Kind,
    corpus: shared.Corpus = None,
    held_back: shared.HeldBack = None,
    texts: shared.Texts = 9000,
    more_text: Annotated[list[Path] | None, typer.Option(help="WORK of another `train text`: read too.")] = None,
    taps: Taps = None,
    guesses: Guesses = 0,
    vocabulary: VocabularyKind = "shared",
    head_rank: HeadRank = 128,
    num_logits: NumLogits = 16384,
    depth: Depth = 1,
    layers: Layers = None,
    link_rank: LinkRank = -1,
    adapter_rank: AdapterRank = 128,
    loss: Loss = None,
    decay: Decay = 0.8,
    row_share: RowShare = 0.25,
    prompt_weight: shared.PromptWeight = 1.0,
    document_share: shared.DocumentShare = 0.0,
    batch: shared.Batch = 4,
    length: shared.Length = 512,
    rate: Rate = 1.0,
    seconds: shared.Seconds = 1300.0,
    resume: shared.Resume = False,
    compile_loss: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the loss first.")] = True,
    save_every: shared.SaveEvery = 100.0,
    report_every: shared.ReportEvery = 20,
    threads: shared.Threads = 0,
    device: shared.Device = "auto",
    count_cpu: shared.CountCpu = False,
    deadline: shared.Deadline = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a head that guesses from the target's hidden states, and measure it on held-back text."""
    from mirrorsd.training.heads.head_shape import HeadPlan
    from mirrorsd.training.heads.head_training import HeadTrainingConfig
    from mirrorsd.training.text.work_folder import training_text

    check_output(output, target, work, *(more_text or ()))
    asked: dict[str, Any] = {"kind": kind, "taps": read_taps(taps), "length": guesses, "vocabulary": vocabulary}
    asked |= {"head_rank": head_rank, "num_logits": num_logits, "depth": depth, "num_layers": layers}
    plan = HeadPlan(**asked, link_rank=link_rank, adapter_rank=adapter_rank)
    rows: dict[str, Any] = {"sequences": batch, "length": length, "row_share": row_share, "rate": rate}
    rows |= {"decay": decay, "prompt_weight": prompt_weight, "is_compiled": compile_loss}
    how = HeadTrainingConfig(mix=read_mix(loss, plan.usual.loss), **rows)
    config = run_config(work / kind, (seconds, deadline, False), (save_every, report_every, count_cpu))
    size = _check_plan(context, plan, how, target)
    checkpoint = shared.open_target(target, trained=size, tokens=batch * length, threads=threads, device=device)
    shared.check_fresh(work / kind, resume=resume)
    source = shared.TextSource(corpus=corpus, held_back=held_back, count=texts, more=tuple(more_text or ()))
    shared.check_text(work, source, (batch, length), document_share, seconds, checkpoint)
    model, documents = open_target_and_text(checkpoint, source, work, document_share)
    text = training_text([work, *(more_text or ())], documents, document_share)
    found = measure_head(model, _train(model, plan, text, (work, output), (config, how)), work, checkpoint.eos_ids)
    print_json(found) if as_json else print_head_report(found)


def _check_plan(context: typer.Context, plan: "HeadPlan", how: "HeadTrainingConfig", target: Path) -> int:
    """Refuse what no head of this target can be, before any weight is read; return how many parameters are trained."""
    from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
    from mirrorsd.export.checkpoints.weightless import open_model
    from mirrorsd.training.heads.head_shape import num_trained

    config = plan.config(open_model(open_checkpoint(target, "target")).network)
    how.spans(config.length)
    for vocabulary, size in (("low-rank", "head_rank"), ("reduced", "num_logits")):
        if plan.vocabulary != vocabulary:
            options.refuse_without(f"--vocabulary {vocabulary}", context, size)
    return num_trained(config)


def _train(model: Any, plan: Any, text: Any, places: tuple[Path, Path], how: tuple[Any, Any]) -> Any:
    """Train a head, put it in its folder and return it; `places` are work folder and the head's folder."""
    from mirrorsd.training.heads.head_folder import save_head
    from mirrorsd.training.heads.head_shape import make_head
    from mirrorsd.training.heads.head_training import train_head
    from mirrorsd.training.models.model_folder import finished_folder
    from mirrorsd.training.run.loss_curve import plot_losses
    from mirrorsd.training.run.timed_run import LOSSES_FILE
    from mirrorsd.training.text.work_folder import open_text

    work, folder = places
    config, training = how
    network = make_head(plan.config(model), model, text.tokens if plan.vocabulary == "reduced" else None)
    with training_bar(f"training {plan.kind}") as show:
        run = train_head(model, network, (text, open_text(work / HELD_BACK_FOLDER)), config, training, show)
    if (config.out / LOSSES_FILE).is_file():
        plot_losses(config.out / LOSSES_FILE, config.out / "losses.png")
    with finished_folder(folder) as partial:
        save_head(network, partial)
        run.write_record(partial)
    note(f"wrote {folder}; losses in {config.out}")
    return network


def measure_head(model: Any, network: Any, work: Path, ends: tuple[int, ...]) -> dict[str, Any]:
    """Agreement and tokens per step on some of the held-back text, and on its prompts continued at temperature 1."""
    from mirrorsd.training.heads.head_report import report_head
    from mirrorsd.training.text.answers import continue_sampled

    texts = shared.held_back_texts(work)
    greedy = texts[:: max(1, len(texts) // _REPORTED_TEXTS)]
    prompts = [text.tokens[: text.prompt_length] for text in texts]
    sampled = continue_sampled(model, prompts[:: max(1, len(prompts) // _SAMPLED_TEXTS)], ends, _NEW_TOKENS)
    found = report_head(model, network, {"held back": greedy}, sampled)
    (work / f"{found['kind']}_report.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def read_taps(text: str | None) -> tuple[int | str, ...]:
    """Read `2,15,27` or `final`; nothing where nothing is given.

    Raises:
        ConfigError: something else.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdigit() or part == "final" for part in parts):
        raise ConfigError(f"--taps is {text!r}; expected numbers of layers and `final`, such as 2,15,27")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def read_mix(text: str | None, usual: Mapping[str, float]) -> "LossMix":
    """Read `tv=0.9,hard=0.1`; the `usual` shares where nothing is given.

    Raises:
        ConfigError: another name, or no number.
    """
    from mirrorsd.training.divergence import LossMix

    if text is None:
        return LossMix(**usual)
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        if name not in ("kl", "tv", "lk", "hard") or not share.replace(".", "", 1).isdigit():
            raise ConfigError(f"--loss is {text!r}; expected shares of kl, tv, lk and hard, such as tv=0.9,hard=0.1")
        shares[name] = float(share)
    return LossMix(**shares)
