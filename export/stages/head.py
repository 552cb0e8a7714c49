"""A head as a stage: the hidden states of a pass where they lie, share-buffer caches, and the whole chain of guesses.

Owns: inputs and outputs in the order of `head_contract`. Does not own: what a head computes (`families.heads`).
"""

import torch
from torch import Tensor, nn

from mirrorsd.export.stages.target import product_in_place
from mirrorsd.export.stages.top_candidates import top_candidates
from mirrorsd.families.heads import HeadChain, HeadNetwork
from mirrorsd.families.heads.vocabulary import Vocabulary
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import HeadShape, StageContract


class HeadStage(nn.Module):
    """A head over the first rows of the target's last pass."""

    def __init__(self, network: HeadNetwork, contract: StageContract, shape: HeadShape) -> None:
        super().__init__()
        self.input_names = [spec.name for spec in contract.inputs]
        self.shape = shape
        split_matrices(network.lm_head)
        read_in_place(network.lm_head)
        self.chain = HeadChain(network, num_candidates=shape.num_candidates, shortlist=top_candidates)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Read rows and guess; inputs and outputs are those of `head_contract`, in its order."""
        by_name = dict(zip(self.input_names, inputs, strict=True))
        tokens, start, noise = (by_name[name] for name in (names.HEAD_TOKENS, names.HEAD_START, names.HEAD_NOISE))
        rows = torch.arange(tokens.shape[1])
        taps = [by_name[names.tap(layer)].index_select(1, rows) for layer in self.shape.taps]
        token_map = self.chain.network.lm_head.map
        if token_map is not None:
            noise = noise.index_select(1, token_map)
        pairs = ((names.past_key(layer), names.past_value(layer)) for layer in range(self.shape.num_layers))
        caches = [by_name[name] for pair in pairs for name in pair]
        ids, logprobs, *new = self.chain(torch.cat(taps, dim=-1), tokens, start, rows[-1:], noise, *caches)
        present = [put_rows(cache, added, start) for cache, added in zip(caches, new, strict=True)]
        return ids, logprobs, *present


def put_rows(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Write rows `[1, kvh, R, hd]` into a cache `[1, kvh, C, hd]` from `start[0]` on.

    Where the cache that comes out is the memory of the one that went in, nothing else is copied.
    """
    places = (start + torch.arange(rows.shape[2]))[None, None, :, None]
    return cache.scatter(2, places.expand(rows.shape), rows)


def split_matrices(vocabulary: Vocabulary) -> None:
    """Let each guess have a matrix of its own where they lie in one `[K, V, w]`: a product's weight has two axes."""
    weight = vocabulary.weight
    if weight.ndim == 3:
        parts = nn.ParameterList(nn.Parameter(part.contiguous(), requires_grad=False) for part in weight)
        vocabulary.matrices = parts
        vocabulary.matrix = lambda guess: parts[guess]  # type: ignore[method-assign]


def read_in_place(vocabulary: Vocabulary) -> None:
    """Let a matrix of all guesses be read as it lies: where it is the target's, it is stored once."""
    by_linear = vocabulary.product

    def product(states: Tensor, matrix: Tensor) -> Tensor:
        if matrix is not vocabulary.weight:
            return by_linear(states, matrix)
        logits = product_in_place(states.reshape(-1, states.shape[-1]), matrix)
        return logits.reshape(*states.shape[:-1], logits.shape[-1])

    vocabulary.product = product  # type: ignore[method-assign]
