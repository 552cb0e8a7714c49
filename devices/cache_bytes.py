"""How much memory a conversation's caches take, by what a bundle says of itself."""

import numpy as np

from mirrorsd.graphs.contract import MOST_STATES
from mirrorsd.graphs.manifest import DraftEntry, Manifest, TargetEntry


def cache_bytes(manifest: Manifest) -> int:
    """Return the most memory that one conversation's caches take, on both devices together."""
    return target_cache_bytes(manifest.target) + head_cache_bytes(manifest) + draft_cache_bytes(manifest.draft)


def target_cache_bytes(entry: TargetEntry) -> int:
    """Return the bytes of the target's caches at its whole capacity, and of states as many as are ever kept."""
    shape = entry.shape
    num_layers = len(shape.attention_layers)
    rows = 2 * num_layers * shape.num_kv_heads * entry.capacity * shape.head_dim * shape.bytes_per_number
    return rows + MOST_STATES * shape.state_bytes


def head_cache_bytes(manifest: Manifest) -> int:
    """Return the bytes of all heads' caches, as if one conversation used every one of them."""
    target, shapes = manifest.target, [head.shape for head in manifest.heads]
    per_row = sum(2 * shape.num_layers * shape.num_kv_heads * shape.head_dim for shape in shapes)
    return per_row * target.capacity * target.shape.bytes_per_number


def draft_cache_bytes(entry: DraftEntry) -> int:
    """Return the bytes of the draft's caches at its largest capacity."""
    shape = entry.shape
    per_slot = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * np.dtype(shape.dtype).itemsize
    return per_slot * max(entry.capacities)
