"""How a draft's weights are to be compressed, checked before any work. Needs neither torch nor a model.

Owns: the choices. Does not own: doing it (`draft_compression.py`), measuring it (`draft_accuracy.py`).
"""

from dataclasses import dataclass

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import FOR_PROCESSORS, IN_BLOCKS, IN_ROWS

COMPRESSED = ("int8", "int4", *FOR_PROCESSORS)
GROUP_SIZES = (-1, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCompression:
    """How to compress a draft's weights; they are symmetric, which is what NPUs want.

    Attributes:
        weights: "int8" (one scale per output row), "int4"; or for ONNX Runtime on a processor, which multiplies them
            faster than OpenVINO: "int8-rows", products of integers, or "int4-blocks".
        group_size: int4 and int4-blocks only: weights of a row that share a scale, -1 for the whole row (int4). Rows
            whose length is no multiple of it get one scale.
        is_data_aware: int4 only: choose roundings by what the draft computes on the target's own text.
        allows_loss: keep a draft that loses more of its accepted length than is accepted otherwise.
    """

    weights: str
    group_size: int = 128
    is_data_aware: bool = False
    allows_loss: bool = False

    def __post_init__(self) -> None:
        """Check that the choices exist and go together."""
        if self.weights not in COMPRESSED:
            raise ConfigError(f"draft weights are {self.weights!r}; allowed: {', '.join(COMPRESSED)}")
        if self.group_size not in GROUP_SIZES:
            allowed = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"the draft's group size is {self.group_size}; allowed: {allowed}")
        if self.weights == IN_BLOCKS and self.group_size == -1:
            raise ConfigError("int4-blocks have 32, 64 or 128 weights each; the draft's group size is -1")
        if self.is_data_aware and self.weights != "int4":
            raise ConfigError("data-aware compression is for int4: int8 rounds too finely for the data to matter")

    @property
    def scheme(self) -> str:
        """One word for the manifest: "int8", "int8-rows", "int4-g128", "int4-g-1-data"."""
        if self.weights in ("int8", IN_ROWS):
            return self.weights
        return f"{self.weights}-g{self.group_size}{'-data' if self.is_data_aware else ''}"
