"""What a draft's streams have to themselves: a small residual on their rows, around the layers they share.

Owns: the formula, for training and export alike. Does not own: which rows are streams, training, files.

The layers that streams pass are the main rows' own. Trained for both, they serve neither as well as they could; with
adapters (the low-rank parameters of Speculative Streaming, arXiv 2402.11131, here beside the layers and not inside
them) the shared weights can be left to the main rows.
"""

from torch import Tensor
from torch.nn.functional import linear, silu


def adapt_streams(rows: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return `rows + up silu(down rows)`: `rows [..., H]`, `down [rank, H]`, `up [H, rank]`."""
    return rows + linear(silu(linear(rows, down)), up)
