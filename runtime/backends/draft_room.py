"""One cache for the drafts of several conversations: each has slots of its own, and one pass has the rows of all.

What a row sees is said by the pass's mask, so that this is the draft's own graph, with a larger cache and more rows. It
reads the weights once for all of them.

Owns: who has which slots, joint passes. Does not own: sessions (`devices/slot_draft`), whose passes (`joint_rounds`).
"""

from collections.abc import Sequence

import numpy as np

from mirrorsd.devices.draft_memory import CachePart, DraftPass, DraftShapes, RowBlock, SlotCache, TipGuesses
from mirrorsd.devices.draft_passes import Shape
from mirrorsd.devices.slot_draft import DraftNoise, PassBuffers
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.runtime.backends.joint_rounds import JointDraft

Found = dict[int, TipGuesses]
"""By the session's identity."""


class DraftRoom(JointDraft):
    """Runs passes of one draft's sessions, on whichever thread computes."""

    def __init__(self, entry: DraftEntry, shapes: DraftShapes) -> None:
        self._entry, self._shapes, self._noise = entry, shapes, DraftNoise(entry.shape)

    def run(self, passes: Sequence[DraftPass], *, is_alone: bool) -> list[TipGuesses]:
        """Run passes of different sessions, together as far as they fit; `is_alone`: nobody has shared lately."""
        found = Found()
        for one in passes:
            one.session.reserve(one.blocks)
        for group in self._groups(passes):
            found |= self._run(group, is_alone=is_alone)
        return [found[id(one.session)] for one in passes]

    def _groups(self, passes: Sequence[DraftPass]) -> list[list[DraftPass]]:
        """Which passes are one: who shares a cache stays together, since moving to another one copies all of it."""
        sharing: dict[int, list[DraftPass]] = {}
        for one in passes:
            sharing.setdefault(_memory_of(one.session.cache), []).append(one)
        groups = list[list[DraftPass]]()
        for own in sorted(sharing.values(), key=len, reverse=True):
            for unit in [own] if self._shape(own) is not None else [[one] for one in own]:
                place = next((group for group in groups if self._shape([*group, *unit]) is not None), None)
                if place is None:
                    groups.append(unit)
                else:
                    place += unit
        return groups

    def _run(self, group: Sequence[DraftPass], *, is_alone: bool) -> Found:
        first, *others = group
        has_own = not others and (is_alone or not isinstance(first.session.cache, CachePart))
        shape = None if has_own else self._shape(group)
        if shape is None:
            return {id(one.session): one.session.run_alone(one.blocks, one.tip_rows) for one in group}
        if _whole_of(group) is None:
            self._seat(group, shape[2])
        return self._run_together(group, shape)

    def _shape(self, group: Sequence[DraftPass]) -> Shape | None:
        """Of a pass of all; None if there is none."""
        whole, entry = _whole_of(group), self._entry
        size = sum(one.session.cache.capacity for one in group) if whole is None else whole.capacity
        capacity = next((known for known in sorted(entry.capacities) if known >= size), None)
        num_noisy = sum(len(one.tip_rows) for one in group if not one.session.is_silent)
        if capacity is None or num_noisy * (1 + entry.shape.num_streams) >= max(len(self._noise.rows), 1):
            return None
        num_rows = sum(len(block.tokens) for one in group for block in one.blocks)
        bucket = self._shapes.joint_bucket(num_rows, sum(len(one.tip_rows) for one in group), capacity)
        return None if bucket is None else (bucket.rows, bucket.tips, capacity)

    def _seat(self, group: Sequence[DraftPass], capacity: int) -> None:
        whole, requests, first = self._shapes.new_cache(capacity), {}, 0  # type: ignore[var-annotated]
        for one in group:
            part = CachePart(whole, first, one.session.cache.capacity, requests)
            one.session.move_to(part)
            first += part.capacity

    def _run_together(self, group: Sequence[DraftPass], shape: Shape) -> Found:
        cache, blocks, tip_rows, first_rows = group[0].session.cache, list[RowBlock](), list[int](), [0]
        for one in group:
            row, slot = first_rows[-1], one.session.cache.first
            blocks += [block._replace(first_slot=slot, first_row=row) for block in one.blocks]
            tip_rows += [row + tip for tip in one.tip_rows]
            first_rows.append(row + sum(len(block.tokens) for block in one.blocks))
        if shape not in cache.requests:
            cache.requests[shape] = self._shapes.new_request(shape, cache.whole)
        request = cache.requests[shape]
        request.buffers.inputs.fill(blocks, tip_rows)
        if len(self._noise.rows):
            request.use_noise(self._noise)
            self._name_noise(group, request.buffers)
        request.infer()
        found, tip = Found(), 0
        for one, row, end in zip(group, first_rows, first_rows[1:], strict=False):
            # Copies: another session's pass may come before these are kept, and goes through the same memory.
            one.session.last = [new[:, :, row:end].copy() for new in request.buffers.new_rows]
            tips = slice(tip, tip := tip + len(one.tip_rows))
            ids, logprobs = request.buffers.tip_ids[tips], request.buffers.tip_logprobs[tips]
            found[id(one.session)] = TipGuesses(ids.copy(), logprobs.copy())
        return found

    def _name_noise(self, group: Sequence[DraftPass], buffers: PassBuffers) -> None:
        """Gather the rows of noise that the tips name; row 0 is that of texts without."""
        tip, row = 0, 1
        buffers.noise_rows.fill(0)
        for one in group:
            end = tip + len(one.tip_rows)
            if not one.session.is_silent:
                places = buffers.tip_positions(end)[tip:]
                named, numbers = np.unique(one.session.noise.rows_at(places), return_inverse=True)
                self._noise.rows[row : row + len(named)] = one.session.noise.rows[named]
                buffers.noise_rows[tip:end] = row + numbers.reshape(places.shape)
                row += len(named)
            tip = end


def _whole_of(group: Sequence[DraftPass]) -> SlotCache | None:
    """The cache that all have a part of; None where not all have."""
    cache = group[0].session.cache
    is_shared = len({_memory_of(one.session.cache) for one in group}) == 1 and isinstance(cache, CachePart)
    return cache.whole if is_shared else None


def _memory_of(cache: SlotCache | CachePart) -> int:
    """Which cache it is, or is a part of."""
    return id(cache.whole if isinstance(cache, CachePart) else cache)
