"""`[estimate]`: what a card supposes of a machine that is not here, and the pace that follows for a pair of models.

The NPU's rounds come from its compiler's report; the target's passes from the bytes that they read over the GPU's
bandwidth. Nothing of it is measured, and whatever shows such a figure says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mirrorsd.device_maps.pace import Pace
from mirrorsd.graphs.errors import ConfigError

NPU_PLATFORMS = ("3720", "4000", "5010")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Suppositions about a machine; a card says where each comes from.

    Attributes:
        npu: the NPU's platform, by which a report is chosen.
        gpu_gb_per_s: the memory's bandwidth, which GPU and NPU share.
        gpu_share: what reading weights reaches of it.
        row_share: by how much each row beyond the first lengthens a pass.
        layer_ms: starting a layer's kernels.
        host_ms: the processor's part of a draft round: look-ups and masks before it, the best tokens after it.
        transfer_ms: one hand-over between the devices.
    """

    npu: str
    gpu_gb_per_s: float
    gpu_share: float = 0.75
    row_share: float = 0.02
    layer_ms: float = 0.03
    host_ms: float = 0.4
    transfer_ms: float = 0.2

    def __post_init__(self) -> None:
        """Check the platform, and that nothing takes less than no time."""
        if self.npu not in NPU_PLATFORMS:
            raise ConfigError(f"estimate.npu is {self.npu!r}; allowed: {', '.join(NPU_PLATFORMS)}.")
        if self.gpu_gb_per_s <= 0 or not 0 < self.gpu_share <= 1:
            raise ConfigError(
                f"estimate.gpu_gb_per_s is {self.gpu_gb_per_s} and gpu_share {self.gpu_share}; a bandwidth is above 0, "
                "a share of it above 0 and up to 1."
            )
        for name in ("row_share", "layer_ms", "host_ms", "transfer_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"estimate.{name} is {getattr(self, name)}; allowed: 0 or more.")

    def pace(self, target_gb: float, exit_gb: float, num_layers: int, round_us: Mapping[int, float]) -> Pace:
        """The pace of a pair on this machine.

        Args:
            target_gb: What a pass of the target reads.
            exit_gb: What an exit reads.
            num_layers: Of the target.
            round_us: The compiler's estimates of draft rounds by rows; the most rows are the prompt's.

        >>> machine = Estimate(npu="4000", gpu_gb_per_s=100.0, gpu_share=0.8, layer_ms=0.0, host_ms=0.5)
        >>> pace = machine.pace(4.0, 0.4, 32, {8: 500.0, 32: 700.0, 128: 1280.0})
        >>> pace.target_ms, pace.exit_ms
        (((1.0, 50.0), (8.0, 57.0)), 5.0)
        >>> pace.draft_ms, pace.prefill_ms_per_row
        (((8.0, 1.0), (32.0, 1.2)), 0.01)
        """
        gb_per_ms = self.gpu_gb_per_s * self.gpu_share / 1e3
        one_row = target_gb / gb_per_ms + num_layers * self.layer_ms
        *rounds, prompt = sorted(round_us)
        if not rounds:
            raise ConfigError("The report has a single number of rows; compile the bundle's rounds and its prompt.")
        return Pace(
            target_ms=((1.0, round(one_row, 3)), (8.0, round(one_row * (1 + 7 * self.row_share), 3))),
            draft_ms=tuple((float(rows), round(round_us[rows] / 1e3 + self.host_ms, 3)) for rows in rounds),
            exit_ms=round(exit_gb / gb_per_ms, 3),
            transfer_ms=self.transfer_ms,
            prefill_ms_per_row=round(round_us[prompt] / 1e3 / prompt, 5),
        )
