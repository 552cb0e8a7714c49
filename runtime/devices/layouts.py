"""Layouts: which cores, and so how many threads, target and draft get where both compute on the processor.

`apart` is what the card says of target and draft: side by side, on cores of their own. `shared` gives both all of the
card's shared cores, by turns: serial and plain decoding have the whole processor, mirror decoding contends for it.
Owns which layout is in force and what it makes of a card. Which one is fastest is for `mirrorsd tune` to find.
"""

from dataclasses import replace
from typing import NamedTuple

from mirrorsd.device_maps import DeviceMap, TargetPlacement
from mirrorsd.device_maps.card import MAX_THREADS, SHARED
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.devices.processor import Cores, usable_cores


class Layout(NamedTuple):
    """A card as it is laid out in force, and why this way."""

    name: str
    device_map: DeviceMap
    reason: str


def choose_layout(card: DeviceMap, asked: str | None = None, tuned: str | None = None) -> Layout:
    """The layout that the caller asks for; else `tuned`, the one that was found fastest; else the card's first.

    Raises:
        ConfigError: the card does not permit the layout asked for.
    """
    if asked is not None and asked not in card.layouts:
        raise ConfigError(f"layout is {asked!r}; device map {card.name!r} permits {', '.join(card.layouts)}.")
    name, reason = card.layouts[0], f"the first of {card.name}"
    if asked is not None:
        name, reason = asked, "as asked for"
    elif tuned in card.layouts:
        name, reason = str(tuned), "the fastest when tuned"
    elif len(card.layouts) > 1:
        reason += "; `mirrorsd tune` finds the fastest"
    return Layout(name, lay_out(card, name), f"layout: {name} ({reason})")


def lay_out(card: DeviceMap, layout: str, cores: Cores | None = None) -> DeviceMap:
    """The card with the cores and threads that a layout gives to target and draft.

    Args:
        card: a device map.
        layout: `apart` or `shared`.
        cores: what the process may use; looked up by default.
    """
    if layout != SHARED:
        return card
    named = Cores(card.shared_cores, len(card.shared_cores)) if card.shared_cores else None
    numbers, num_threads = named or cores or usable_cores()
    threads = min(num_threads, MAX_THREADS)
    target = replace(card.target, cores=numbers, threads=threads)
    return replace(card, target=target, draft=replace(card.draft, cores=numbers, threads=threads))


def target_thread_cores(target: TargetPlacement) -> tuple[int, ...]:
    """Where the target's own thread runs.

    ONNX Runtime pins its pool to all cores but the first (`onnx_providers`) and computes on the calling thread too:
    that one keeps to the first core, or two of them would meet on one core and wait for each other.
    """
    is_pool_pinned = target.runtime == "onnxruntime" and len(target.cores) == target.threads
    return target.cores[:1] if is_pool_pinned else target.cores
