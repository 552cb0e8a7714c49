"""The draft on OpenVINO (CPU, GPU, NPU, or the NPU plugin's wrapper on the CPU).

One IR with symbolic `N`, `R`, `C` is made static for each (rows, tips, capacity) that is used, or compiled once for all
of them (`draft_compiler` says when). Each has a request with all its tensors (`draft_pass`).
"""

from pathlib import Path

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.devices.openvino.draft_compiler import DraftCompiler
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS
from mirrorsd.devices.slot_draft import SlotDraft
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.runtime.backends.draft_room import DraftRoom
from mirrorsd.runtime.backends.joint_rounds import JointRounds
from mirrorsd.runtime.backends.protocol import Progress


class OpenVinoDraftModel:
    """The draft's compiled static shapes, shared by all sessions. Use it on the draft worker's thread."""

    def __init__(
        self, bundle: Path, entry: DraftEntry, placement: DraftPlacement, on_progress: Progress | None = None
    ) -> None:
        self.entry, self.placement = entry, placement
        with raised_as(DeviceError, f"OpenVINO cannot use {placement.device} for the draft", OPENVINO_ERRORS):
            self.shapes = DraftCompiler(bundle, entry, placement, on_progress)
        self.rounds = JointRounds(DraftRoom(entry, self.shapes), takes_any=self.shapes.is_shared)

    def new_session(self) -> SlotDraft:
        """A session with a cache of its own on the shared compiled shapes."""
        return SlotDraft(self)

    def describe(self) -> str:
        """One line for `pipe.placement`."""
        placement = self.placement
        where = f"{placement.device}{' (emulated on CPU)' if placement.emulated else ''}"
        shapes = ", one model for all shapes" if self.shapes.is_shared else ""
        return f"draft: openvino {where}, {placement.precision}, {placement.threads} thread(s){shapes}"
