"""Is an exit worth more as a channel of hidden states than of guesses? Drafts read what is there, on recorded text.

    mirrorsd train text TARGET --corpus PROMPTS.jsonl --work WORK
    python bench/studies/feature_channel.py TARGET --work WORK --documents DOCUMENTS.jsonl --output feature_channel.json

While the target passes a window, a branch behind one of its rows is drafted. Of the rows in that pass (the head token's
and those of the accepted tokens, `g` in all) the last layers' hidden states are not there yet, those up to an exit are.
The same draft (EAGLE-3's layer, a chain of guesses behind the true correction) learns in lockstep, on the same batches:
`ids`: no hidden states at all; `low taps`: of the `g` rows only what the exit's layer has; `passed rows`: nothing of
the `g` rows; `all taps`: everything, as in serial decoding. `own states` is the last one's draft, which goes through
the `g` rows with its own states in place of the target's.

Accepted per branch: a decoding is walked along the text, the rows of a step being those that the step before accepted.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from mirrorsd.bench import runs
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.families import parts_of
from mirrorsd.families.heads import HeadNetwork
from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.choice import Choice
from mirrorsd.graphs.contract import MASKED
from mirrorsd.training.divergence import LossMix
from mirrorsd.training.heads.features import Features, Teacher, teaching
from mirrorsd.training.heads.head_folder import OwnWeights
from mirrorsd.training.heads.head_report import posterior_noise
from mirrorsd.training.heads.head_shape import HeadPlan, make_head
from mirrorsd.training.heads.head_training import HeadTrainingConfig, Taught, draw_spans
from mirrorsd.training.heads.vocabulary_loss import SpanTeacher, vocabulary_loss
from mirrorsd.training.models.attention import use_training_attention
from mirrorsd.training.models.whole_model import load_whole
from mirrorsd.training.run.device import autocast, use_device
from mirrorsd.training.run.optimizers import descend, make_optimizers, set_rate
from mirrorsd.training.run.schedule import WarmStableDecay
from mirrorsd.training.run.timed_run import RunConfig, TimedRun
from mirrorsd.training.text.answers import answer, sample
from mirrorsd.training.text.corpus import read_documents
from mirrorsd.training.text.document_text import document_tokens
from mirrorsd.training.text.self_prompts import load_tokenizer
from mirrorsd.training.text.self_text import SelfText, cut_before_loop
from mirrorsd.training.text.token_stream import MixedStream, TokenStream
from mirrorsd.training.text.work_folder import training_text

CHAIN, LONGEST = 4, 8
"""Guesses of a branch; most rows of a pass in training. A walk meets no more than `CHAIN + 1`."""
WORTH = 1.10


@dataclass(frozen=True, slots=True)
class Variant:
    """What a draft reads of rows that the target has `passed` and of those in its `window`: `all`, `low` or `none`."""

    passed: str
    window: str
    length: int = CHAIN


VARIANTS = {
    "ids": Variant("none", "none"),
    "low taps": Variant("all", "low"),
    "passed rows": Variant("all", "none"),
    "all taps": Variant("all", "all", length=CHAIN + 3),  # longer: `own states` goes through rows before it guesses
}
OWN = "own states"


@dataclass(slots=True)
class WindowRows(FeatureRows):
    """Every row twice: `0 .. S - 1` as the target leaves it, `S .. 2 S - 1` as it is while the target passes it.

    `visible [2 S, 2 S]` says which row sees which.
    """

    visible: Tensor = field(kw_only=True)

    @property
    def positions(self) -> Tensor:
        """Positions `[2 S]` of the rows."""
        return self.start + torch.arange(len(self.visible) // 2).repeat(2)

    @property
    def places_of_tips(self) -> Tensor:
        """Positions `[T]` of the tips, which are rows of windows."""
        return self.start + self.tips - len(self.visible) // 2

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Let every row see what is visible to it: `queries [B, h, 2 S, hd]`, same shape back."""
        keys, values = self.new[layer]
        return scaled_dot_product_attention(queries, keys, values, attn_mask=self.visible, enable_gqa=True)

    def _parts(self, layer: int, tips: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(*self.new[layer], torch.where(self.visible[tips], 0.0, MASKED))]


def visible_rows(begins: Tensor) -> Tensor:
    """Return `[2 S, 2 S]`: row `S + r` sees rows before `begins[r]` as passed, and from there to itself its window's.

    >>> visible_rows(torch.tensor([0, 1, 1])).int()[3:].tolist()  # rows 1 and 2 are one window behind row 0
    [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1]]
    """
    rows = torch.arange(len(begins))
    is_earlier, is_passed = rows <= rows[:, None], rows < begins[:, None]
    of_passed = torch.cat((is_earlier, torch.zeros_like(is_earlier)), dim=1)
    return torch.cat((of_passed, torch.cat((is_passed, is_earlier & ~is_passed), dim=1)))


def draw_windows(length: int, seed: int) -> Tensor:
    """Cut `length` rows into windows of 1 to `LONGEST`; return for every row where its window begins `[length]`."""
    sizes = torch.randint(1, LONGEST + 1, (length,), generator=torch.Generator().manual_seed(seed))
    return torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)[:length]


@dataclass(frozen=True, slots=True)
class Reading:
    """The taps, and the exit's layer: what of them is there while the rest of a pass runs."""

    taps: tuple[int, ...]
    exit_layer: int

    def rows(
        self, variant: Variant, features: Tensor, tokens: Tensor, tips: Tensor, begins: Tensor | None
    ) -> FeatureRows:
        """Return `features [B, S, F]` as `variant` has them; `tips [T]`; `begins [S]`: where each row's window does."""
        start = torch.zeros(1, dtype=torch.long)
        passed = self.kept(features, variant.passed)
        if variant.passed == variant.window:
            return FeatureRows(passed, tokens, tips, start)
        assert begins is not None
        both = torch.cat((passed, self.kept(features, variant.window)), dim=1)
        return WindowRows(both, tokens.repeat(1, 2), tips + len(begins), start, visible=visible_rows(begins))

    def kept(self, features: Tensor, what: str) -> Tensor:
        """Return `features [..., F]`, zero where they are not there."""
        limit = {"all": max(self.taps), "low": self.exit_layer, "none": -1}[what]
        is_there = torch.tensor([tap <= limit for tap in self.taps])
        return features * is_there.repeat_interleave(features.shape[-1] // len(self.taps))


class Batch(NamedTuple):
    """A step's text `ids [B, S + 1]`, what the target leaves on it, first rows of spans, where windows begin `[S]`."""

    ids: Tensor
    features: Features
    firsts: Tensor
    begins: Tensor


def train(
    target: PreTrainedModel,
    networks: dict[str, HeadNetwork],
    reading: Reading,
    text: TokenStream | MixedStream,
    plan: tuple[RunConfig, HeadTrainingConfig],
) -> TimedRun:
    """Train all variants in place, every step on the same rows of the same text; a killed run goes on."""
    run, config = plan
    target.requires_grad_(False)
    optimizers = {name: make_optimizers(network) for name, network in networks.items()}
    parts: dict[str, Any] = {name: OwnWeights(network) for name, network in networks.items()} | {"text": text}
    parts |= {f"{name}, {kind}": one for name, kinds in optimizers.items() for kind, one in kinds.items()}
    timed = TimedRun(run, parts)
    with teaching(target) as teacher:

        def step(share: float) -> tuple[int, dict[str, float]]:
            ids = text.take(config.sequences, config.length)
            spans, begins = draw_spans(config, CHAIN + 3, timed.step), draw_windows(config.length, timed.step)
            with autocast():
                batch = Batch(ids, teacher.read(ids[:, :-1], reading.taps), spans, begins)
            losses = {}
            for name, network in networks.items():
                set_rate(optimizers[name].values(), config.rate * share)
                with autocast():
                    loss = chain_loss(teacher, network, VARIANTS[name], batch, reading, config)
                descend(loss, network.parameters(), optimizers[name].values())
                losses[name] = loss.item()
            return ids[:, 1:].numel(), losses

        timed.run(step, lambda: None)
    return timed


def chain_loss(
    teacher: Teacher, network: HeadNetwork, variant: Variant, batch: Batch, reading: Reading, config: HeadTrainingConfig
) -> Tensor:
    """Compare the guesses behind the batch's spans with the target; guess `k` counts `decay ** k`."""
    length, num_guesses = config.spans(CHAIN + 3)[1], variant.length
    tips = batch.firsts[:, None] + torch.arange(length)
    ahead = tips.flatten()[:, None] + 2 + torch.arange(num_guesses)
    taught = Taught(batch.ids[:, ahead])
    network.unroll(reading.rows(variant, batch.features.taps, batch.ids[:, 1:], tips.flatten(), batch.begins), taught)
    states = taught.states.reshape(-1, length, *taught.states.shape[2:])
    counts = torch.full(states.shape[:3], 1 / (states.shape[0] * length)) * config.decay ** torch.arange(num_guesses)
    wanted = batch.features.final[:, batch.firsts[:, None] + torch.arange(1, length + num_guesses)].flatten(0, 1)
    given = SpanTeacher(wanted, teacher.head, teacher.logit_scale, network.lm_head.map)
    return vocabulary_loss(states, teacher.head, given, counts, config.mix, scale=network.lm_head.scale).total


class ToldFirst(Choice):
    """A chain that is told its first guesses, `told [T, g]`, and makes the rest."""

    def __init__(self, network: HeadNetwork, noise: Tensor | None, told: Tensor) -> None:
        super().__init__(network.lm_head, noise)
        self._told = told

    def one(self, guess: int, state: Tensor) -> Tensor:
        """Return what is told, or choose."""
        num_told = self._told.shape[1]
        return self._told[None, :, guess] if guess < num_told else super().one(guess - num_told, state)


class Recorded(NamedTuple):
    """A text by the target, what the target leaves on it, and the noise `[rows, V]` it was sampled with, if any."""

    text: SelfText
    features: Features
    noise: Tensor | None

    @property
    def tips(self) -> Tensor:
        """Rows behind which branches are measured: the token that follows is the target's, and one more is left."""
        return torch.arange(self.text.prompt_length - 1, len(self.text.tokens) - 2)

    def ahead(self) -> Tensor:
        """Rows `[T, CHAIN]` that choose what a branch should be; those past the end stand for nothing."""
        return self.tips[:, None] + 1 + torch.arange(CHAIN)


@torch.no_grad()
def record(teacher: Teacher, reading: Reading, text: SelfText) -> Recorded:
    """Pass a text; draw the noise that its tokens were sampled with, as it is distributed given them."""
    features = teacher.read(torch.tensor([text.tokens[:-1]]), reading.taps)
    if not text.temperature:
        return Recorded(text, features, None)
    first = text.prompt_length - 1
    logits, chosen = teacher.logits(features.final[0, first:]), torch.tensor(text.tokens[first + 1 :])
    drawn = posterior_noise(logits, chosen, torch.Generator().manual_seed(len(text.tokens)))
    return Recorded(text, features, torch.cat((drawn.new_zeros(first, drawn.shape[1]), drawn)))


@torch.no_grad()
def branches(network: HeadNetwork, name: str, reading: Reading, recorded: Recorded, in_pass: int) -> Tensor:
    """Guess `[T, CHAIN]` behind each tip while it and the `in_pass - 1` rows before it are in the target's pass.

    All tips at once: right for heads of one layer, whose keys and values of a row depend on no other row.
    """
    tokens, tips, noise = torch.tensor(recorded.text.tokens), recorded.tips, recorded.noise
    begins = (torch.arange(len(tokens) - 1) - in_pass + 1).clamp(min=0)
    shared = None if noise is None else noise[recorded.ahead().clamp(max=len(noise) - 1)].transpose(0, 1)
    told = tokens[:0].expand(len(tips), 0)
    if name == OWN:
        tips = (tips - in_pass).clamp(min=0)
        told = tokens[tips[:, None] + 2 + torch.arange(in_pass)]
    network.config = replace(network.config, length=CHAIN + told.shape[1])
    choice = ToldFirst(network, shared, told)
    variant = VARIANTS["all taps" if name == OWN else name]
    network.unroll(reading.rows(variant, recorded.features.taps, tokens[None, 1:], tips, begins), choice)
    return choice.ids[:, :, 0]


def accepted(guessed: Tensor, recorded: Recorded) -> list[int]:
    """How many leading guesses of each branch `[T, CHAIN]` are the text's own tokens."""
    truth = torch.tensor([*recorded.text.tokens, *[-1] * CHAIN])[recorded.ahead() + 1]
    counts: list[int] = (guessed == truth).int().cumprod(-1).sum(-1).tolist()
    return counts


def walk(found: Sequence[Sequence[int]]) -> list[int]:
    """Take steps along a text, and return what each accepts; `found[g - 1][i]`: at place `i` with `g` rows in the pass.

    >>> walk([[9, 1, 0, 0, 9, 9], [9, 9, 9, 2, 0, 1]])  # from 1 to 3, there with two rows in the pass: past the end
    [1, 2]
    """
    taken, place, in_pass = list[int](), 1, 1
    while place < len(found[0]):
        taken.append(found[min(in_pass, len(found)) - 1][place])
        place, in_pass = place + taken[-1] + 1, taken[-1] + 1
    return taken


def measure(networks: dict[str, HeadNetwork], reading: Reading, recordings: Sequence[Recorded]) -> dict[str, Any]:
    """Accepted tokens per branch and their gains, with intervals over texts; by rows in the pass at all places."""
    rows, sums = dict[str, Any](), dict[str, NDArray[Any]]()
    for name in (*VARIANTS, OWN):
        network = networks["all taps" if name == OWN else name]
        counts = range(1, 2 if name in ("ids", "all taps") else CHAIN + 2)
        found = [[accepted(branches(network, name, reading, one, g), one) for g in counts] for one in recordings]
        sums[name] = np.array([(sum(steps), len(steps)) for steps in map(walk, found)], dtype=float)
        by_g = [np.concatenate([of_text[g - 1][g:] for of_text in found]) for g in counts]
        rows[name] = interval(sums[name]) | {
            "accepted": [round(float(of_g.mean()), 4) for of_g in by_g],
            "first_right": [round(float((of_g > 0).mean()), 4) for of_g in by_g],
        }
        print(name, rows[name], flush=True)
    pairs = [(name, other) for name in ("low taps", "all taps", OWN) for other in ("ids", "passed rows", OWN)]
    gains = {f"{one} / {other}": interval(sums[one], sums[other]) for one, other in pairs if one != other}
    return {
        "texts": len(recordings),
        "places": sum(len(of_text[0]) for of_text in found),
        "variants": rows,
        "gains": gains,
    }


def interval(sums: NDArray[Any], others: NDArray[Any] | None = None) -> dict[str, float]:
    """Accepted per step of texts `[n, 2]` (accepted, steps), or its ratio to the others'; 95 % by bootstrap."""

    def figure(drawn: NDArray[Any]) -> NDArray[Any]:
        mine: NDArray[Any] = sums[drawn].sum(-2)
        theirs: NDArray[Any] | None = None if others is None else others[drawn].sum(-2)
        found: NDArray[Any] = mine[..., 0] / mine[..., 1]
        return found if theirs is None else found / (theirs[..., 0] / theirs[..., 1])

    drawn = np.random.default_rng(20).integers(len(sums), size=(2000, len(sums)))
    figures = {"mean": figure(np.arange(len(sums)))}
    figures |= dict(zip(("from", "to"), np.percentile(figure(drawn), (2.5, 97.5)), strict=True))
    return {name: round(float(value), 4) for name, value in figures.items()}


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = runs.parser(__doc__, count=60, tokens=96)
    parser.add_argument("target", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="`text` of `mirrorsd train text`; checkpoints")
    parser.add_argument("--documents", type=Path, required=True, help="half of what is read, beside the target's texts")
    parser.add_argument("--taps", type=int, nargs="*", default=[2, 3, 5])
    parser.add_argument("--exit-layer", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1500.0, help="of a core, all variants together")
    parser.add_argument("--deadline", type=float, help="seconds since 1970 when training must be over")
    parser.add_argument("--sequences", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Train, measure, print and write the report."""
    options = arguments()
    use_device("cpu")
    torch.set_num_threads(1)
    target, tokenizer = load_whole(options.target), load_tokenizer(options.target)
    use_training_attention(target)
    end, reading = int(tokenizer.eos_token_id), Reading(tuple(options.taps), options.exit_layer)
    networks = {
        name: make_head(HeadPlan(kind="eagle3", taps=reading.taps, length=variant.length).config(target), target)
        for name, variant in VARIANTS.items()
    }
    documents = TokenStream(document_tokens(read_documents(options.documents), tokenizer, end))
    schedule = WarmStableDecay(budget_s=options.seconds, decay_s=0.4 * options.seconds)
    run = RunConfig(out=options.work / "channel", schedule=schedule, deadline=options.deadline, counts_cpu=True)
    config = HeadTrainingConfig(mix=LossMix(kl=1.0), sequences=options.sequences, length=256)
    timed = train(target, networks, reading, training_text([options.work], documents, 0.5), (run, config))
    report: dict[str, Any] = {"target": options.target.name, "taps": reading.taps, "exit_layer": reading.exit_layer}
    report |= {"machine": describe_machine(), "versions": installed_versions(), "ends": "honoured", "chain": CHAIN}
    report |= {"steps": timed.step, "tokens": timed.tokens, "core_seconds": round(timed.clock.trained_s)}
    own = [weight.numel() for weight in networks["ids"].parameters() if weight.requires_grad]
    report |= {"parameters": sum(own)} | measure_all(target, tokenizer, networks, reading, options)
    gains = [report[name]["gains"]["low taps / passed rows"]["mean"] for name in ("greedy", "sampled")]
    report["verdict"] = "worth building" if min(gains) >= WORTH else "not worth building"
    runs.finish(report, options.output)


def measure_all(
    target: Any, tokenizer: Any, networks: dict[str, HeadNetwork], reading: Reading, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure on greedy text before it loops, and on text at temperature 1."""
    ends, teacher = (int(tokenizer.eos_token_id),), Teacher(target, parts_of(target).lm_head.weight.detach())
    prompts = [messages[0]["content"] for messages in runs.spread_prompts(options.prompts, options.count)]
    greedy = answer(target, tokenizer, [[prompt] for prompt in prompts], ends, options.tokens)
    texts = {"greedy": [cut_before_loop(text) for text in greedy]}
    texts["sampled"] = sample(target, tokenizer, prompts, ends, options.tokens)
    kept = {
        name: [text for text in found if len(text.tokens) - text.prompt_length > 2 * CHAIN]
        for name, found in texts.items()
    }
    return {
        name: measure(networks, reading, [record(teacher, reading, text) for text in found])
        for name, found in kept.items()
    }


if __name__ == "__main__":
    main()
