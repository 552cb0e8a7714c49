"""What a tree of guesses would gain over a chain, where a pass's rows are free: heads on text that their target wrote.

    mirrorsd train text TARGET --corpus PROMPTS.jsonl --work WORK
    python bench/studies/trees/tree_gain.py TARGET --work WORK --head HEAD --head OTHER --output tree_gain.json

A node of a tree is a path of ranks: (0, 2) is the third best second guess behind the best first one. A static tree has
the same nodes at every step. What is accepted follows the text, so all that counts of a head is the rank of the text's
token in each guess, the text before it being told: the ranks (0, 2, 5) accept two tokens of a tree that has (0,) and
(0, 2). The best tree of `n` nodes is the `n` commonest beginnings of ranks. Trees are chosen on every other text and
measured on the rest. The runtime's trees are one guess deep beside the chain. Rows are not free on processors, nor
counted here.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mirrorsd.cli.commands.train.target import held_back_texts
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.families import parts_of
from mirrorsd.families.heads import HeadNetwork
from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.training.heads.features import Teacher
from mirrorsd.training.heads.head_folder import load_head
from mirrorsd.training.heads.head_report import walk
from mirrorsd.training.heads.head_training import Taught
from mirrorsd.training.models.attention import use_training_attention
from mirrorsd.training.models.whole_model import load_whole
from mirrorsd.training.text.self_text import SelfText

SIZES = (8, 16, 32)
Ranks = list[tuple[int, ...]]
Tree = frozenset[tuple[int, ...]]


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of `mirrorsd train text`")
    parser.add_argument("--head", type=Path, action="append", required=True, dest="heads")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    target = load_whole(options.target).requires_grad_(False)
    use_training_attention(target)
    texts = held_back_texts(options.work)
    report: dict[str, Any] = {"target": options.target.name, "texts": len(texts), "temperature": 0}
    report |= {"machine": describe_machine(), "versions": installed_versions()}
    report["heads"] = [gains(target, load_head(folder, target), texts) for folder in options.heads]
    print(json.dumps(report["heads"], indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def gains(target: PreTrainedModel, network: HeadNetwork, texts: Sequence[SelfText]) -> dict[str, Any]:
    """Tokens per step of a head's chain and of its best trees, the target's own token counted."""
    found = [ranks_of(target, network, text) for text in texts if len(text.tokens) - text.prompt_length > 2]
    chosen_on, measured_on = found[::2], found[1::2]
    chain = frozenset((0,) * depth for depth in range(1, network.config.length + 1))
    of_trees = {}
    for size in SIZES:
        tree = best_tree([ranks for text in chosen_on for ranks in text], size)
        depth = max(map(len, tree), default=0)
        of_trees[size] = {"tokens_per_step": tokens_per_step(measured_on, tree), "depth": depth}
    return {
        "kind": network.config.head_kind,
        "chain": {"nodes": len(chain), "tokens_per_step": tokens_per_step(measured_on, chain)},
        "trees": of_trees,
    }


@torch.no_grad()
def ranks_of(target: PreTrainedModel, network: HeadNetwork, text: SelfText) -> Ranks:
    """Behind each row, the rank (0: best) of the text's token in each guess; the text's end cuts them short."""
    parts: Any = parts_of(target)
    features = Teacher(target, parts.lm_head.weight).read(torch.tensor([text.tokens[:-1]]), network.config.taps)
    tokens, num_guesses = torch.tensor(text.tokens), network.config.length
    tips = torch.arange(text.prompt_length - 1, len(tokens) - 2)
    places = tips[:, None] + 2 + torch.arange(num_guesses)
    truth = tokens[places.clamp(max=len(tokens) - 1)]
    taught = Taught(truth[None])
    network.unroll(FeatureRows(features.taps, tokens[None, 1:], tips, torch.zeros(1, dtype=torch.long)), taught)
    by_guess = []
    for guess, state in enumerate(taught.states[0].unbind(1)):
        logits = network.lm_head.logits(state, guess)
        is_true = network.lm_head.tokens(torch.arange(logits.shape[1]))[None] == truth[:, guess, None]
        own = logits.masked_fill(~is_true, -torch.inf).amax(-1, keepdim=True)
        by_guess.append((logits > own).sum(-1))
    ranks = torch.stack(by_guess, dim=1).tolist()
    left = (len(tokens) - places[:, 0]).tolist()
    return [tuple(row[:count]) for row, count in zip(ranks, left, strict=True)]


def best_tree(ranks: Ranks, size: int) -> Tree:
    """The `size` commonest beginnings; a beginning is as common as its own beginnings at least, so they are a tree.

    >>> sorted(best_tree([(0, 0), (0, 3), (2, 0), (0, 3)], 3))
    [(0,), (0, 3), (2,)]
    """
    beginnings = Counter(row[:depth] for row in ranks for depth in range(1, len(row) + 1))
    order = sorted(beginnings, key=lambda path: (-beginnings[path], len(path), path))
    return frozenset(order[:size])


def accepted_by(tree: Tree, ranks: tuple[int, ...]) -> int:
    """How many tokens of the text a tree accepts.

    >>> accepted_by(frozenset({(0,), (0, 2), (1,)}), (0, 2, 5))
    2
    """
    depth = 0
    while depth < len(ranks) and ranks[: depth + 1] in tree:
        depth += 1
    return depth


def tokens_per_step(texts: Sequence[Ranks], tree: Tree) -> float:
    """Walk a decoding along each text; the target's own token is counted."""
    steps = [step for text in texts for step in walk([accepted_by(tree, ranks) for ranks in text], len(text))]
    return round(1 + sum(steps) / max(len(steps), 1), 4)


if __name__ == "__main__":
    main()
