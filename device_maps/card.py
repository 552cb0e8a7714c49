"""A device card as typed values, with the checks that need no machine. Reading TOML is `loading`.

Whether the devices are present on this machine is for the runtime to say.
"""

from dataclasses import dataclass, field

from mirrorsd.device_maps.checks import require_between, require_cores, require_distinct, require_one_of
from mirrorsd.device_maps.estimate import Estimate
from mirrorsd.device_maps.pace import Pace
from mirrorsd.device_maps.providers import ON_CUDA, PROVIDERS
from mirrorsd.graphs.errors import ConfigError

TARGET_RUNTIMES = ("onnxruntime", "openvino")
TARGET_DEVICES = ("CPU", "GPU")
DRAFT_DEVICES = ("CPU", "NPU")
ACTIVATION_GROUPS = (0, 32, 64, 128)
PRECISIONS = ("f32", "bf16", "f16", "auto")
NPU_PRECISIONS = ("f16", "auto")
"""What Intel's NPU computes in: its plugin refuses every other hint (`INFERENCE_PRECISION_HINT`)."""
ALLOCATIONS = ("global", "per_row")
ROOT_SOURCES = ("proxy", "early", "progressive")
WINDOWS = ("full", "worthwhile")
APART, SHARED = "apart", "shared"
LAYOUTS = (APART, SHARED)
MAX_THREADS = 256
MAX_GAMMA = 31
MAX_ROOTS = 128
MAX_KAPPA = 16
MAX_PASSES = 32
MAX_NAME = 100
"""Characters of a card's name, which is part of the names of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlacement:
    """Where prefix, exit and suffix run. `cores = ()` pins nothing; `device_id` counts devices of one kind.

    With `runtime = "onnxruntime"` the `provider` says which device, with `"openvino"` the `device`, which computes in
    `precision` (`auto` leaves it to the device). `graphs` captures a pass of each number of rows once and replays it.
    `huge_pages` puts what loading has left in the host's memory on huge pages, where the processor computes (Linux).
    """

    runtime: str = "onnxruntime"
    provider: str = "CPUExecutionProvider"
    device: str = "CPU"
    precision: str = "auto"
    device_id: int = 0
    graphs: bool = False
    huge_pages: bool = True
    cores: tuple[int, ...] = ()
    threads: int = 1

    def __post_init__(self) -> None:
        """Check every field on its own."""
        require_one_of("target.runtime", self.runtime, TARGET_RUNTIMES)
        require_one_of("target.provider", self.provider, tuple(PROVIDERS))
        require_one_of("target.device", self.device, TARGET_DEVICES)
        require_one_of("target.precision", self.precision, PRECISIONS)
        require_between("target.device_id", self.device_id, 0, 255)
        self._check_number()
        require_between("target.threads", self.threads, 1, MAX_THREADS)
        require_cores("target.cores", self.cores, self.threads)
        if self.graphs and self.provider not in ON_CUDA:
            raise ConfigError(
                f"target.graphs is true with target.provider {self.provider!r}; only {', '.join(ON_CUDA)} "
                "captures graphs."
            )
        if self.runtime == "openvino" and self.provider != "CPUExecutionProvider":
            raise ConfigError(
                f"target.provider is {self.provider!r} with runtime 'openvino'; say target.device instead."
            )
        if self.runtime == "onnxruntime" and (self.device, self.precision) != ("CPU", "auto"):
            raise ConfigError("target.device and target.precision are for runtime 'openvino'; say target.provider.")

    def _check_number(self) -> None:
        """Refuse the number of a device where devices have none: another one would be used without a word."""
        has_numbers = PROVIDERS[self.provider].has_numbers if self.runtime == "onnxruntime" else self.device != "CPU"
        if self.device_id and not has_numbers:
            where = self.provider if self.runtime == "onnxruntime" else f"OpenVINO's {self.device}"
            raise ConfigError(
                f"target.device_id is {self.device_id}; devices of {where} have no numbers: leave it out."
            )

    @property
    def is_on_cpu(self) -> bool:
        """Whether the target computes on the processor's own cores."""
        return self.provider == "CPUExecutionProvider" and self.device == "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlacement:
    """Where the draft runs. `emulated` sends it through the NPU plugin's wrapper, computed on the CPU.

    `precision` is what the device computes in, on a processor `f32` if nothing is said, on an NPU `f16`; `auto` leaves
    it to the device. `activation_group` activations share a scale when they are rounded to eight bits under int8 and
    int4 weights on a processor; 0 rounds none.
    """

    runtime: str = "openvino"
    device: str = "CPU"
    emulated: bool = False
    cores: tuple[int, ...] = ()
    threads: int = 1
    precision: str = ""
    activation_group: int = 0

    def __post_init__(self) -> None:
        """Check every field on its own, that only an NPU is emulated, and that activations are rounded on a CPU."""
        require_one_of("draft.runtime", self.runtime, ("openvino",))
        require_one_of("draft.device", self.device, DRAFT_DEVICES)
        is_npu = self.device == "NPU" and not self.emulated
        if not self.precision:
            object.__setattr__(self, "precision", "f16" if is_npu else "f32")
        require_one_of("draft.precision", self.precision, NPU_PRECISIONS if is_npu else PRECISIONS)
        require_between("draft.threads", self.threads, 1, MAX_THREADS)
        require_cores("draft.cores", self.cores, self.threads)
        if self.activation_group not in ACTIVATION_GROUPS or (self.activation_group and self.device != "CPU"):
            allowed = ", ".join(map(str, ACTIVATION_GROUPS))
            raise ConfigError(
                f"draft.activation_group is {self.activation_group} with draft.device {self.device!r}; allowed: "
                f"{allowed} on 'CPU', 0 elsewhere."
            )
        if self.emulated and self.device != "NPU":
            raise ConfigError(f"draft.emulated is true with draft.device {self.device!r}; only 'NPU' can be emulated.")

    @property
    def is_on_cpu(self) -> bool:
        """Whether the draft computes on the processor's own cores (an emulated NPU does)."""
        return self.device == "CPU" or self.emulated


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitPlacement:
    """Where the exits run: with the `target`, or on an `NPU` through OpenVINO (`emulated`: as in `DraftPlacement`)."""

    device: str = "target"
    emulated: bool = False
    precision: str = "f16"
    threads: int = 1

    def __post_init__(self) -> None:
        """Check every field on its own, and that only an NPU is emulated."""
        require_one_of("exit.device", self.device, ("target", "NPU"))
        is_npu = self.device == "NPU" and not self.emulated
        require_one_of("exit.precision", self.precision, NPU_PRECISIONS if is_npu else PRECISIONS)
        require_between("exit.threads", self.threads, 1, MAX_THREADS)
        if self.emulated and self.device != "NPU":
            raise ConfigError(f"exit.emulated is true with exit.device {self.device!r}; only 'NPU' can be emulated.")

    @property
    def as_draft(self) -> DraftPlacement:
        """The same place for a draft: both are static graphs on OpenVINO."""
        return DraftPlacement(
            device=self.device, emulated=self.emulated, precision=self.precision, threads=self.threads
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationDefaults:
    """How widely to speculate when the caller does not say.

    `gamma` window tokens, `roots` branches per step under `global` allocation, `kappa` candidates per row under
    `per_row`, `root_source` whose guesses roots come from, `passes` draft passes per window, `window` whether windows
    are cut to what is worth its rows' time (see docs/device-maps.md).
    """

    gamma: int = 6
    roots: int = 8
    root_source: str = "early"
    allocation: str = "global"
    kappa: int = 8
    passes: int = 2
    window: str = "worthwhile"

    def __post_init__(self) -> None:
        """Check every field on its own."""
        require_between("speculation.gamma", self.gamma, 1, MAX_GAMMA)
        require_between("speculation.roots", self.roots, 0, MAX_ROOTS)
        require_one_of("speculation.root_source", self.root_source, ROOT_SOURCES)
        require_one_of("speculation.allocation", self.allocation, ALLOCATIONS)
        require_between("speculation.kappa", self.kappa, 1, MAX_KAPPA)
        require_between("speculation.passes", self.passes, 1, MAX_PASSES)
        require_one_of("speculation.window", self.window, WINDOWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMap:
    """One card.

    `fallbacks` names the cards that may stand in where this one's devices are absent, best first; `pace`, if any, sets
    the stage times of hardware that is not there; `estimate` is what `mirrorsd simulate` makes them of, and changes
    nothing else. `layouts` are the permitted ways to share out the processor's cores,
    the first one in force until `mirrorsd tune` has found which is fastest: `apart` as target and draft say, `shared`
    with `shared_cores` for both (all that the process may use if none are named). `tried` says whether the card has
    ever run on a machine of its kind: where `auto` picks one that has not, it says so.
    """

    name: str
    description: str = ""
    target: TargetPlacement = field(default_factory=TargetPlacement)
    draft: DraftPlacement = field(default_factory=DraftPlacement)
    exit: ExitPlacement = field(default_factory=ExitPlacement)
    speculation: SpeculationDefaults = field(default_factory=SpeculationDefaults)
    fallbacks: tuple[str, ...] = ()
    pace: Pace | None = None
    estimate: Estimate | None = None
    layouts: tuple[str, ...] = (APART,)
    shared_cores: tuple[int, ...] = ()
    tried: bool = True

    def __post_init__(self) -> None:
        """A card has a name, never falls back to itself, and shares cores only where both devices are the processor."""
        if not self.name:
            raise ConfigError("name is empty; give the card a name.")
        if len(self.name) > MAX_NAME or not self.name.isprintable() or set(self.name) & set('/\\:*?"<>|'):
            raise ConfigError(
                f"name is {self.name[:MAX_NAME]!r}; it is part of the names of files: at most {MAX_NAME} characters, "
                'none of / \\ : * ? " < > |.'
            )
        if self.name in self.fallbacks:
            raise ConfigError(f"fallbacks of {self.name!r} name the card itself; remove it.")
        self._check_layouts()

    def _check_layouts(self) -> None:
        require_distinct("layouts", self.layouts, LAYOUTS)
        require_cores("shared_cores", self.shared_cores, 1)
        is_shareable = self.target.is_on_cpu and self.draft.device == "CPU"
        if SHARED in self.layouts and not is_shareable:
            raise ConfigError(
                "layouts has 'shared', but target and draft do not both compute on the processor; remove it."
            )
        if self.shared_cores and SHARED not in self.layouts:
            raise ConfigError(f"shared_cores is {list(self.shared_cores)}, but layouts has no 'shared'; add it.")
