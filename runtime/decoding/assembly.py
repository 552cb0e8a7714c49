"""From the parts of a request to its decoder: one assembly for real devices, for simulated ones and for tests."""

from collections.abc import Callable

from mirrorsd.runtime.decoding.auto import AutoSource
from mirrorsd.runtime.decoding.draft_link import DraftLine
from mirrorsd.runtime.decoding.head import HeadLink, HeadSource
from mirrorsd.runtime.decoding.lookup import FreeRows, LookupSource, Repeats
from mirrorsd.runtime.decoding.mirror import MirrorSource
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.step import SerialSource, StepDecoder
from mirrorsd.runtime.decoding.target_link import TargetLine
from mirrorsd.runtime.draft.tree import BranchTable
from mirrorsd.runtime.policy.account import Knowledge
from mirrorsd.runtime.policy.roots import RootPlanner


def plain_decoder(request: Request, target: TargetLine) -> StepDecoder:
    """Decodes without a draft."""
    return StepDecoder(request, target, FreeRows(request), "plain")


def lookup_decoder(request: Request, target: TargetLine, known: Knowledge) -> StepDecoder:
    """Decodes with windows from the text itself."""
    is_sampling = request.chooser.is_sampling
    request.windows = known.windows(request.speculation, is_sampling=is_sampling)
    request.look_up(known.lengths[is_sampling].repeats)
    return StepDecoder(request, target, LookupSource(request, target.row_group), "lookup")


def head_decoder(request: Request, target: TargetLine, head: HeadLink, known: Knowledge) -> StepDecoder:
    """Decodes with windows from a head."""
    is_sampling = request.chooser.is_sampling
    request.windows = known.windows(request.speculation, is_sampling=is_sampling, head=head.kind)
    return StepDecoder(request, target, HeadSource(request, head), head.kind)


def decoder_with(
    request: Request,
    method: str,
    target: TargetLine,
    draft: DraftLine,
    known: Knowledge,
    new_table: Callable[[], BranchTable] = BranchTable,
) -> StepDecoder:
    """Decodes with a draft by `serial`, `mirror` or `auto`; branches of mirror decoding go into `new_table()`."""
    if method == "plain":
        return plain_decoder(request, target)
    is_sampling = request.chooser.is_sampling
    request.windows = known.windows(request.speculation, is_sampling=is_sampling)
    if request.speculation.repeats:
        request.look_up(known.lengths[is_sampling].repeats)
    passes = request.speculation.passes if draft.drafter.session.shape.num_streams else request.gamma
    serial = SerialSource(request, draft, passes)
    planner = RootPlanner(request.speculation, request.chooser, known.root_scores)
    mirror = MirrorSource(serial, target, planner, new_table)
    if method == "serial":
        return StepDecoder(request, target, serial, method)
    if method == "mirror":
        return StepDecoder(request, target, mirror, method)
    pair = known.pairs[is_sampling]
    is_overlapping = pair.method == "mirror" or (not pair.method and not draft.takes_turns)
    source = AutoSource(
        serial, mirror if is_overlapping else serial, Repeats(request), FreeRows(request, target.row_group), pair
    )
    return StepDecoder(request, target, source, method)
