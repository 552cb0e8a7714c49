"""`mirrorsd train draft`: a streaming draft for a target, distilled on text that the target writes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mirrorsd.cli.commands.train import target as shared
from mirrorsd.cli.commands.train.report import measure_drafts, print_report
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import note, print_json, training_bar
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.whole_file import try_place
from mirrorsd.training.text import HELD_BACK_FOLDER

if TYPE_CHECKING:
    from mirrorsd.training.distill_draft import DistillConfig
    from mirrorsd.training.run.schedule import WarmStableDecay
    from mirrorsd.training.run.timed_run import RunConfig

SHAPE, LOSS = "Shape", "Loss"

FromModel = Annotated[
    Path | None,
    typer.Option(
        help="Start from this small causal LM with the same tokenizer, or from a draft and its streams.",
        rich_help_panel=SHAPE,
    ),
]
FromLayers = Annotated[
    str | None,
    typer.Option(
        help="Start from these layers of the target, such as 0,1,2,27,28,29; its token embedding is shared.",
        rich_help_panel=SHAPE,
    ),
]
HeadRank = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --from-layers: rank of the head over the vocabulary; 0: the target's own head.",
        rich_help_panel=SHAPE,
    ),
]
HeadTokens = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --from-layers: ids that the head names, the first ones; 0: all.",
        rich_help_panel=SHAPE,
    ),
]
TrainEmbedding = Annotated[
    bool,
    typer.Option(
        "--train-embedding", help="Train the shared embedding too; the draft then has its own.", rich_help_panel=LOSS
    ),
]
Distance = Annotated[
    str, typer.Option("--loss", help="Distance to the target: kl, tv (total variation) or lk.", rich_help_panel=LOSS)
]
StreamRank = Annotated[
    int, typer.Option(min=0, help="Hidden units of the streams' own adapters; 0: none.", rich_help_panel=SHAPE)
]
LinkRank = Annotated[
    int,
    typer.Option(
        min=0,
        help="Hidden units of the link that tells streams what was chosen before; 0: none.",
        rich_help_panel=SHAPE,
    ),
]
Rate = Annotated[
    float, typer.Option(min=0, help="Peak learning rate, as a share of the usual one.", rich_help_panel=LOSS)
]
StreamsOnly = Annotated[
    bool,
    typer.Option(
        "--streams-only",
        help="Train the streams' own weights alone; main rows stay as they are. Wants --from-model DRAFT.",
        rich_help_panel=LOSS,
    ),
]
MoreText = Annotated[
    list[Path] | None, typer.Option(help="WORK of another `train text` with this target: its text is read too.")
]
Baseline = Annotated[
    bool, typer.Option("--baseline", help="Train an s = 0 draft of the same size for as long, and compare.")
]


def draft(
    context: typer.Context,
    target: shared.Target,
    output: Annotated[Path, typer.Option("-o", "--output", help="The draft's folder.", show_default=False)],
    work: shared.Work,
    corpus: shared.Corpus = None,
    held_back: shared.HeldBack = None,
    texts: shared.Texts = 9000,
    more_text: MoreText = None,
    from_model: FromModel = None,
    from_layers: FromLayers = None,
    head_rank: HeadRank = 128,
    head_tokens: HeadTokens = 0,
    train_embedding: TrainEmbedding = False,
    distance: Distance = "kl",
    streams: Annotated[int, typer.Option(help="Streams; 0 makes an ordinary draft.", rich_help_panel=SHAPE)] = 3,
    stream_layers: Annotated[int, typer.Option(help="Top layers that streams pass.", rich_help_panel=SHAPE)] = 2,
    stream_rank: StreamRank = 64,
    link_rank: LinkRank = 128,
    hidden: Annotated[int, typer.Option(help="Hidden size, from scratch.", rich_help_panel=SHAPE)] = 256,
    layers: Annotated[int, typer.Option(help="Layers, from scratch.", rich_help_panel=SHAPE)] = 3,
    stream_weight: Annotated[float, typer.Option(help="Weight of each stream's loss.", rich_help_panel=LOSS)] = 0.05,
    streams_from: shared.StreamsFrom = 0.33,
    tip_share: shared.TipShare = 0.2,
    argmax_weight: shared.ArgmaxWeight = 0.2,
    prompt_weight: shared.PromptWeight = 1.0,
    document_share: shared.DocumentShare = 0.0,
    batch: shared.Batch = 6,
    length: shared.Length = 1024,
    rate: Rate = 1.0,
    streams_only: StreamsOnly = False,
    seconds: shared.Seconds = 1300.0,
    baseline: Baseline = False,
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
    """Train a streaming draft: the target writes text, the draft learns its distributions, the result is measured."""
    check_output(output, target, work, *(more_text or ()))
    weights: Any = {"stream_weight": stream_weight, "argmax_weight": argmax_weight, "prompt_weight": prompt_weight}
    rows: dict[str, Any] = {"streams_from": streams_from, "tip_share": tip_share, "sequences": batch, "length": length}
    rows |= {"is_compiled": compile_loss, "trains_embedding": train_embedding, "loss": distance}
    loss = _loss(**weights, **rows, rate=rate, streams_only=streams_only)
    config = run_config(work, (seconds, deadline, baseline), (save_every, report_every, count_cpu))
    sizes: Any = {"hidden": hidden, "layers": layers, "stream_layers": stream_layers, "stream_rank": stream_rank}
    sizes |= {"link_rank": link_rank, "source": from_model, "from_layers": read_layers(from_layers)}
    plan = DraftPlan(**sizes, head=(head_rank, head_tokens), streams_only=streams_only)
    size = _checked(context, plan, target, streams, baseline)
    checkpoint = shared.open_target(target, trained=size, tokens=batch * length, threads=threads, device=device)
    runs = _fresh_runs(work, output, streams, baseline=baseline, resume=resume)
    source = shared.TextSource(corpus=corpus, held_back=held_back, count=texts, more=tuple(more_text or ()))
    shared.check_text(work, source, (batch, length), document_share, seconds * len(runs), checkpoint)
    model = _train_all(checkpoint, plan, runs, (work, source, document_share, size), (config, loss))
    (print_json if as_json else print_report)(measure_drafts(model, output, runs[1][2] if baseline else None, work))


def _checked(context: typer.Context, plan: "DraftPlan", target: Path, num_streams: int, has_baseline: bool) -> int:
    """Check a plan (`DraftPlan.check`), and refuse sizes that something else decides."""
    size = plan.check(target, num_streams, has_baseline)
    if not plan.from_layers:
        options.refuse_without("--from-layers", context, "head_rank")
    if plan.source or plan.from_layers:
        options.refuse_beside("beside what the draft starts from", context, "hidden", "layers")
    if not num_streams:
        of_streams = ("stream_layers", "stream_rank", "link_rank", "stream_weight", "streams_from", "tip_share")
        options.refuse_beside("with --streams 0", context, *of_streams)
    return size


def _fresh_runs(
    work: Path, output: Path, num_streams: int, *, baseline: bool, resume: bool
) -> list[tuple[str, int, Path]]:
    """What is trained one after the other: the name of its folder in `work`, its streams, and where it goes."""
    runs = [("draft", num_streams, output), ("baseline", 0, output.with_name(f"{output.name}-s0"))][: 1 + baseline]
    shared.check_fresh(*(work / name for name, *_ in runs), resume=resume)
    return runs


def _loss(**given: Any) -> "DistillConfig":
    from mirrorsd.training.distill_draft import DistillConfig

    return DistillConfig(**given)


def check_output(folder: Path, *read: Path) -> None:
    """Refuse to write what is trained where it cannot be, over something else, or over what is read for it."""
    from mirrorsd.training.models.model_folder import check_replaceable

    check_replaceable(folder)
    if not folder.name:
        raise ConfigError(f"--output {folder} is no name of a folder: give one, which is made.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try_place(folder.with_name(f"{folder.name}.trial"))
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be written: {error.strerror}. Give another place.") from error
    for path in read:
        if path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"--output {folder} is, or holds, {path}, which is read for it: choose another name.")


def _train_all(
    checkpoint: Any,
    plan: "DraftPlan",
    runs: list[tuple[str, int, Path]],
    given: tuple[Path, shared.TextSource, float, int],
    how: tuple[Any, Any],
) -> Any:
    """Train the draft, and its baseline if `runs` has one; return the target."""
    from mirrorsd.training.text.work_folder import training_text

    work, source, document_share, size = given
    config, loss = how
    spare = shared.spare_memory(checkpoint, trained=size, tokens=loss.sequences * loss.length)
    loss = replace(loss, remembered_bytes=spare)
    model, documents = open_target_and_text(checkpoint, source, work, document_share)
    for name, num_streams, folder in runs:
        text = training_text([work, *source.more], documents, document_share)
        places = (checkpoint.folder, work, folder)
        _train(model, plan.make(model, num_streams), text, places, (replace(config, out=work / name), loss))
    return model


def open_target_and_text(checkpoint: Any, source: shared.TextSource, work: Path, document_share: float) -> Any:
    """The target, once it has written its text, and the corpus's documents if some are wanted."""
    documents = shared.open_documents(checkpoint, source) if document_share else None
    model = shared.load_target(checkpoint)
    shared.prepare_texts(model, checkpoint, work, source, only_held_back=document_share == 1)
    return model, documents


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """How large a draft is, and what it starts from.

    That is nothing but sizes, a small model (or a draft) in `source`, or some of the target's layers with a `head`
    (`DraftHead`). With `streams_only` a source's own weights stay as they are.
    """

    hidden: int
    layers: int
    stream_layers: int
    stream_rank: int
    link_rank: int
    source: Path | None
    streams_only: bool
    from_layers: tuple[int, ...] = ()
    head: tuple[int, int] = (0, 0)

    def check(self, target: Path, num_streams: int, has_baseline: bool) -> int:
        """Check the plan against the target; return about how many parameters are trained.

        Raises:
            ConfigError: sizes that no draft can have, other streams than the small model was trained with, or nothing
                that could be trained.
            ExportError: the small model is not complete, or speaks other tokens than the target.
        """
        from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
        from mirrorsd.export.checkpoints.compatibility import check_compatible
        from mirrorsd.training.draft_shape import check_draft_sizes, check_layers, check_same_streams
        from mirrorsd.training.models.streaming_draft import check_stream_layers

        if self.streams_only and (self.source is None or not num_streams or has_baseline):
            raise ConfigError(
                "--streams-only leaves main rows as they are: it wants --from-model and streams, and no --baseline"
            )
        if self.streams_only and not self.stream_rank + self.link_rank:
            raise ConfigError("--streams-only trains adapters and link; give --stream-rank or --link-rank above 0")
        of_target = open_checkpoint(target, "target")
        _check_head_tokens(self.head[1], self.from_layers, int(of_target.config["vocab_size"]))
        if self.source is not None and self.from_layers:
            raise ConfigError("--from-model and --from-layers both say what to start from; give one of them")
        if self.from_layers:
            config = of_target.config
            check_layers(self.from_layers, int(config["num_hidden_layers"]), str(config["model_type"]))
            check_stream_layers(num_streams, self.stream_layers, len(self.from_layers))
            share = len(self.from_layers) / int(config["num_hidden_layers"])
            return round(of_target.source.num_parameters * share) + self.head[0] * int(config["vocab_size"])
        if self.source is not None:
            small = open_checkpoint(self.source, "draft")
            check_compatible(of_target, small)
            check_stream_layers(num_streams, self.stream_layers, int(small.config["num_hidden_layers"]))
            check_same_streams(self.source, self._shape(num_streams))
            return small.source.num_parameters
        check_draft_sizes(self.hidden, self.layers)
        check_stream_layers(num_streams, self.stream_layers, self.layers)
        return self.hidden * (int(of_target.config["vocab_size"]) + 12 * self.layers * self.hidden)

    def make(self, target: Any, num_streams: int) -> Any:
        """Return the untrained draft with that many streams."""
        return self._make(target, self._shape(num_streams)).to(target.device)

    def _make(self, target: Any, streams: Any) -> Any:
        from mirrorsd.training.draft_shape import DraftHead, draft_from_layers, draft_from_model, draft_from_scratch

        if self.from_layers:
            return draft_from_layers(target, streams, self.from_layers, DraftHead(*self.head))
        if self.source is not None:
            return draft_from_model(self.source, streams, target.get_input_embeddings().weight)
        return draft_from_scratch(target, streams, hidden=self.hidden, layers=self.layers)

    def _shape(self, num_streams: int) -> Any:
        from mirrorsd.training.models.streaming_draft import StreamShape

        return StreamShape(num_streams, self.stream_layers, self.stream_rank, self.link_rank)


def _check_head_tokens(count: int, layers: tuple[int, ...], vocab_size: int) -> None:
    if count and not layers:
        raise ConfigError("--head-tokens is for a draft that --from-layers cuts out of the target; give that, too")
    if count > vocab_size:
        raise ConfigError(f"--head-tokens is {count}; this target has {vocab_size} tokens: give fewer, or 0 for all")


def read_layers(text: str | None) -> tuple[int, ...]:
    """Read `0,1,29`; nothing where nothing is given.

    Raises:
        ConfigError: no numbers.
    """
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"--from-layers is {text!r}; expected numbers of layers, such as 0,1,2,27,28,29") from error


def run_config(work: Path, budget: tuple[float, float | None, bool], notes: tuple[float, int, bool]) -> "RunConfig":
    """When a training ends (seconds, deadline, has a baseline), what it notes when, and whose seconds count."""
    from mirrorsd.training.run.timed_run import RunConfig

    save_every, report_every, counts_cpu = notes
    return RunConfig(
        out=work,
        schedule=_schedule(*budget),
        deadline=budget[1],
        save_every_s=save_every,
        report_every=report_every,
        counts_cpu=counts_cpu,
    )


def _schedule(seconds: float, deadline: float | None, has_baseline: bool) -> "WarmStableDecay":
    from mirrorsd.training.run.schedule import WarmStableDecay

    if has_baseline and deadline is not None:
        raise ConfigError("--baseline gives both drafts the same time, and --deadline would cut the second one short")
    return WarmStableDecay(budget_s=seconds, decay_s=seconds / 3)


def _train(model: Any, draft: Any, text: Any, places: tuple[Path, Path, Path], how: tuple[Any, Any]) -> None:
    """Train one draft and put it in its folder; `places` are target, work folder and the draft's folder."""
    from mirrorsd.training.distill_draft import distill_draft
    from mirrorsd.training.models.model_folder import copy_tokenizer, finished_folder
    from mirrorsd.training.run.loss_curve import plot_losses
    from mirrorsd.training.run.timed_run import LOSSES_FILE
    from mirrorsd.training.text.work_folder import open_text

    target, work, folder = places
    config, loss = how
    with training_bar(f"training {config.out.name}") as show:
        run = distill_draft(model, draft, (text, open_text(work / HELD_BACK_FOLDER)), config, loss, show)
    if (config.out / LOSSES_FILE).is_file():
        plot_losses(config.out / LOSSES_FILE, config.out / "losses.png")
    with finished_folder(folder) as partial:
        draft.save(partial)
        copy_tokenizer(target, partial)
        run.write_record(partial)
    note(f"wrote {folder}; losses in {config.out}")
