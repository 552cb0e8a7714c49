"""Loading: from a bundle's folder and the name of a device map to the parts that a pipeline consists of."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from itertools import accumulate, cycle, product
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mirrorsd.device_maps import DeviceMap, DraftPlacement
from mirrorsd.device_maps.card import SHARED
from mirrorsd.device_maps.pace import Curve
from mirrorsd.devices import endings
from mirrorsd.devices.huge_pages import Region, new_regions, regions_now, use_huge_pages
from mirrorsd.devices.inventory import cannot_run, cannot_take_trees, choose_device_map
from mirrorsd.devices.layouts import Layout, choose_layout, thread_cores
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError, DeviceError
from mirrorsd.graphs.manifest import DraftEntry, Manifest
from mirrorsd.hub.bundles import bundle_folder
from mirrorsd.runtime.backends.paced import PacedDraftModel, PacedTargetModel
from mirrorsd.runtime.backends.protocol import DraftModel, Progress, TargetModel
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.tuned import Keeper, Tuned, recall
from mirrorsd.texts.config import SpeculationConfig, Speculations
from mirrorsd.texts.speculation import Given, check_fits, resolve_speculation, speculation_of
from mirrorsd.texts.tokenizer import BundleTokenizer

if TYPE_CHECKING:
    from mirrorsd.runtime.backends.onnxruntime.draft import OnnxDraftModel
    from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
    from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel
    from mirrorsd.runtime.backends.openvino.exits import OpenVinoExits
    from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel


_MEASURING_S = 0.2
"""Beside other programs `auto` then writes 0.84 to 0.90 as fast as with right times. 0.05: 0.61 to 0.67. 0.8: 0.84 to
0.96, and every start takes longer (`bench/claims/process/first_times.py`)."""
_FURTHER_ROWS = (32, 16, 4, 2)
"""Measured behind a pass of one row and one of a window, as far as there is time: the longest repeats first."""


class Parts(NamedTuple):
    """What a pipeline consists of: see `MirrorPipeline`."""

    engine: Engine
    tokenizer: BundleTokenizer
    manifest: Manifest
    layout: Layout
    speculations: Speculations
    placement: list[str]


def load_parts(
    bundle: str | Path,
    device_map: str,
    given: Given,
    *,
    use_tuned: bool,
    layout: str | None,
    on_progress: Progress | None = None,
) -> Parts:
    """Load a bundle: see `MirrorPipeline.load`; `given` are the caller's values of `SpeculationConfig`."""
    folder = bundle_folder(bundle, on_progress)
    manifest, folder = read_bundle(folder), folder.absolute()  # wherever the program goes
    choice = choose_device_map(device_map, bundle=manifest)
    if reason := cannot_run(choice.device_map, manifest):
        raise DeviceError(reason)
    tuned = Tuned.read(folder, choice.device_map) if use_tuned else None
    laid_out = choose_layout(choice.device_map, layout, tuned.layout if tuned and tuned.is_tuned else None)
    found = tuned if tuned and tuned.layout == laid_out.name else None
    speculations = _resolve(choice.device_map, found, given)
    check_runs(speculations, choice.device_map, manifest)
    before = regions_now()
    known = _known(laid_out.device_map, tuned, found)
    with endings.beside(partial(BundleTokenizer, folder, manifest.target.shape.vocab_size)) as reading:
        engine = _start_engine(folder, manifest, laid_out, speculations.greedy, known, on_progress)
        if not known.target_ms:
            most = 1 + speculations.greedy.gamma
            known.target_ms = engine.target_worker.submit(partial(measure_passes, engine.target_model, most)).result()
            if known.target_ms and laid_out.device_map.target.is_on_cpu:
                known.measure_again = partial(_measure_again, engine.target_worker, engine.target_model, most)
        if found:
            recall(known, found.learned)
        if use_tuned:
            engine.keeper = Keeper(folder, choice.device_map, laid_out.name, known)
    tokenizer = _result_or_close(reading, engine)
    source = "tuned on this machine" if found and found.is_tuned else f"defaults of {choice.device_map.name}"
    placement = [*choice.reasons, laid_out.reason, *engine.describe(), f"speculation: {source}"]
    if found and found.learned:
        placement.append("speeds and chances: learned from earlier texts on this machine")
    if _wants_huge_pages(laid_out.device_map):
        engine.beside.begin(partial(_use_huge_pages, new_regions(before), placement))
    return Parts(engine, tokenizer, manifest, laid_out, speculations, placement)


def check_runs(ways: Speculations, card: DeviceMap, manifest: Manifest) -> None:
    """Refuse ways to speculate that a bundle cannot go on a card.

    Raises:
        ConfigError: one wants exits or a context that the bundle does not have, or siblings where there can be none.
    """
    for one in ways:
        check_fits(one, manifest.target)
        if one.siblings and (reason := cannot_take_trees(card, manifest)):
            raise ConfigError(f"siblings need a pass whose rows form a tree, but {reason}. Leave them out (siblings=0)")


def _known(card: DeviceMap, tuned: Tuned | None, found: Tuned | None) -> Knowledge:
    """What the card says of its devices, and what was tuned: scores in any layout, times only if `found` in this."""
    known = Knowledge(target_ms=card.pace.target_ms if card.pace else ())
    if tuned:
        known.root_scores = RootScores.from_dict(tuned.root_scores)
    if found:
        known.is_tuned = found.is_tuned
        known.target_ms = found.target_ms or known.target_ms
        known.pairs[False].start_from(found.tokens_per_second, found.tokens_per_step, known.target_ms)
        known.pairs[True].start_from(found.sampled_tokens_per_second, found.sampled_tokens_per_step, known.target_ms)
    return known


def _resolve(card: DeviceMap, tuned: Tuned | None, given: Given) -> Speculations:
    """The card's settings, what was tuned on top of them, what the caller gives on top of both."""
    defaults = partial(resolve_speculation, speculation_of(card))
    greedy = tuned.speculation if tuned else {}
    sampled = tuned.sampled_speculation or greedy if tuned else {}
    return Speculations(*(resolve_speculation(defaults(one), given) for one in (greedy, sampled)))


def _start_engine(
    folder: Path,
    manifest: Manifest,
    layout: Layout,
    speculation: SpeculationConfig,
    known: Knowledge,
    on_progress: Progress | None = None,
) -> Engine:
    """Load both models on their workers, run each once, and set the pace if the card has one."""
    from mirrorsd.runtime.backends.openvino.exits import OpenVinoExits

    card = layout.device_map

    def load_target() -> TargetModel:
        exits = OpenVinoExits(folder, manifest.target, card.exit) if card.exit.device != "target" else None
        if exits is not None:
            exits.warm_up(1 + speculation.gamma)
        model = _open_target(folder, manifest, card, exits, takes_trees=speculation.siblings > 0)
        with closing(model.new_session()) as session:
            session.warm_up(1 + speculation.gamma)
        return PacedTargetModel(model, card.pace, manifest.target.shape.num_layers) if card.pace else model

    def load_draft() -> DraftModel:
        model = open_draft(folder, manifest.draft, card.draft, on_progress)
        model.new_session().warm_up()
        return PacedDraftModel(model, card.pace) if card.pace else model

    return Engine(
        load_target,
        load_draft,
        known=known,
        target_cores=thread_cores(card.target, in_onnxruntime=card.target.runtime == "onnxruntime"),
        draft_cores=thread_cores(card.draft, in_onnxruntime=manifest.draft.is_for_processors),
        is_target_lent=card.target.is_on_cpu,
        takes_turns=layout.name == SHARED,
        huge_pages=_wants_huge_pages(card),
    )


def open_draft(
    folder: Path, entry: DraftEntry, placement: DraftPlacement, on_progress: Progress | None = None
) -> "OnnxDraftModel | OpenVinoDraftModel":
    """Open the draft in the runtime that it was written for."""
    from mirrorsd.runtime.backends.onnxruntime.draft import OnnxDraftModel
    from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel

    is_onnx, parts = entry.is_for_processors, (folder, entry, placement)
    return OnnxDraftModel(*parts) if is_onnx else OpenVinoDraftModel(*parts, on_progress)


def measure_passes(model: TargetModel, rows_of_window: int, is_wanted: Callable[[], bool] = lambda: False) -> Curve:
    """What the target's pass takes by rows, where nobody has measured it: without that no window can be weighed.

    Takes `_MEASURING_S`, or two passes of two sizes where these take longer. The first pass of a size may take several
    times as long as the next, which follows at once: no size is left with that one alone. Runs on the target worker's
    thread; once somebody else wants that (`is_wanted`), it leaves off.

    Returns:
        `[rows, ms]` points, each the shortest of its passes and of those of more rows: what disturbs one only makes it
        longer.
    """
    with closing(model.new_session()) as session:
        first, *others = (1, rows_of_window, *_FURTHER_ROWS)
        sizes = [first, *(rows for rows in others if first < rows <= session.context)]
        ended, shortest = perf_counter() + _MEASURING_S, dict[int, float]()
        for rows, kind in cycle(product(sizes, ("cold", "warm"))):
            started = perf_counter()
            is_over = started >= ended and kind == "cold"
            if (is_over and len(shortest) > 1) or is_wanted():
                break
            if not is_over or rows not in shortest:
                session.run(np.zeros(rows, np.int64), 0, with_logits=False, ledger=Ledger())
                shortest[rows] = min(shortest.get(rows, inf), 1e3 * (perf_counter() - started))
    return _rising({float(rows): ms for rows, ms in shortest.items()})


def _measure_again(worker: DeviceWorker, model: TargetModel, rows_of_window: int, known: Knowledge) -> None:
    """Beside nobody, have the shortest pass of each size, and of more rows, be the shortest that was ever measured."""

    def measure() -> None:
        shortest = dict[float, float]()
        for rows, ms in (*known.target_ms, *measure_passes(model, rows_of_window, worker.has_waiting)):
            shortest[rows] = min(ms, shortest.get(rows, inf))
        known.target_ms = _rising(shortest)

    if not worker.has_pending():
        worker.leave(measure)


def _rising(shortest: Mapping[float, float]) -> Curve:
    """Points `[rows, ms]` of which none is dearer than one of more rows."""
    sizes = sorted(shortest, reverse=True)
    return tuple(sorted(zip(sizes, accumulate((shortest[rows] for rows in sizes), min), strict=True)))


def _wants_huge_pages(card: DeviceMap) -> bool:
    return card.target.is_on_cpu and card.target.huge_pages


def _result_or_close(reading: Future[BundleTokenizer], engine: Engine) -> BundleTokenizer:
    try:
        return reading.result()
    except BaseException:
        engine.close()
        raise


def _use_huge_pages(due: list[Region], placement: list[str], rest: Callable[[float], bool]) -> None:
    if num_bytes := use_huge_pages(due, rest):
        placement.append(f"huge pages: {num_bytes >> 20} MiB")


def _open_target(
    folder: Path, manifest: Manifest, card: DeviceMap, exits: "OpenVinoExits | None", *, takes_trees: bool
) -> "OnnxTargetModel | OpenVinoTargetModel":
    """Load the target on its worker's thread."""
    given = folder, manifest.target, card.target, exits, manifest.heads
    if card.target.runtime == "openvino":
        from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel

        return OpenVinoTargetModel(*given)
    from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel

    return OnnxTargetModel(*given, takes_trees=takes_trees)
