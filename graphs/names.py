"""The name grammar of methods, stages, tensors and files. Nobody else spells these strings."""

from typing import Literal, get_args

Method = Literal[
    "plain", "serial", "mirror", "auto", "lookup", "medusa", "hydra", "eagle3", "block", "streaming", "mtp"
]
METHODS: tuple[Method, ...] = get_args(Method)
HEAD_KINDS = METHODS[METHODS.index("lookup") + 1 :]
"""Of heads that draft from the target's hidden states; each is also the name of the method that uses it."""
OWN_HEAD = "mtp"
"""The kind that comes with some checkpoints; the others are trained."""
TRAINED_HEADS = tuple(kind for kind in HEAD_KINDS if kind != OWN_HEAD)

INPUT_IDS = "input_ids"
HIDDEN = "hidden"
NEXT_HIDDEN = "next_hidden"
SEQLENS_K = "seqlens_k"
TOTAL_LENGTH = "total_length"
LOGIT_ROWS = "logit_rows"
NUM_ROWS = "num_rows"
LOGITS = "logits"
ARGMAX_IDS = "argmax_ids"
ARGMAX_GAP = "argmax_gap"
EXIT_IDS = "exit_ids"
EXIT_LOGPROBS = "exit_logprobs"

EXACT_INTEGERS = ("session.x64quantprecision", "1")
"""The setting of a session under which ONNX Runtime's sums of 8-bit products are exact on every processor.

On x64 without instructions for them (VNNI) it adds two products in 16 bits otherwise, which cuts large sums off. Asked
for precision, it turns signed weights into unsigned ones, whose kernels add in 32 bits. It does so (1.31) on other
processors, too, whose kernels for signed weights are exact and faster (`providers.ask_for_exact_integers`).
Source: `kOrtSessionOptionsAvx2PrecisionMode` in ONNX Runtime's `onnxruntime_session_options_config_keys.h`.
"""

RECURRENCE = "recurrence"
"""The stage that runs recurrent layers' states over accepted rows."""

FED = "fed_"
"""How the names begin of what a pass gives to the recurrences."""

HEAD_VOCABULARIES = ("shared", "own", "low-rank", "reduced")
HEAD_TOKENS = "tokens"
HEAD_START = "start"
HEAD_NOISE = "noise"
HEAD_IDS = "ids"
HEAD_LOGPROBS = "logprobs"

DRAFT_IDS = "ids"
DRAFT_TOKEN_ROWS = "token_rows"
DRAFT_POSITIONS = "positions"
DRAFT_MASK = "mask"
DRAFT_TIP_ROWS = "tip_rows"
DRAFT_NOISE = "noise"
DRAFT_NOISE_ROWS = "noise_rows"
DRAFT_TIP_IDS = "tip_ids"
DRAFT_TIP_LOGPROBS = "tip_logprobs"

MANIFEST_FILE = "manifest.json"
TARGET_FOLDER = "target"
WEIGHTS_FILE = "target/weights.bin"
GGUF_SUFFIX = ".gguf"
GGUF_FILES_SUFFIX = ".files"
"""Of the folder beside a GGUF file that has what it says beside its weights."""
DRAFT_FILE = "draft/draft.xml"
DRAFT_ONNX_FILE = "draft/draft.onnx"
DRAFT_FOLDER = "draft"
NPU_FOLDER = "draft/npu"
NPU_REPORT_FILE = "report.json"
ESTIMATED = "Estimated by the vendor's compiler, not measured"
"""Stands wherever a figure of the NPU compiler's is shown."""
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILE = "tokenizer/tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATE_FILE = "chat_template.{}.jinja"
"""In the tokenizer's folder: the template that is used, and those that have another name."""
DEFAULT_TEMPLATE = "default"

STREAMS_FILE = "streams.safetensors"
STREAMS_FORMAT = "mirrorsd-streams-1"
ADAPTED_STREAMS_FORMAT = "mirrorsd-streams-2"
LINKED_STREAMS_FORMAT = "mirrorsd-streams-3"
STREAMS_FORMATS = (STREAMS_FORMAT, ADAPTED_STREAMS_FORMAT, LINKED_STREAMS_FORMAT)
STREAM_LINK = ("link.down.weight", "link.last.weight", "link.earlier.weight", "link.up.weight")
"""The matrices of `LinkWeights`, in its order."""
STREAM_EMBEDDINGS = "stream_embeddings"
TRAINING_FILE = "training.json"
"""Beside the weights of a draft or a head that was trained here: for how long."""
CALIBRATION_FILE = "calibration.txt"
"""Beside a target's weights: text to measure and to round by."""
LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "README.md", "USE_POLICY*")
"""Patterns of what travels from a checkpoint with its bundle."""
EXIT_ADAPTERS_FILE = "exit_adapters.safetensors"
EXIT_ADAPTERS_FORMAT = "mirrorsd-exit-1"
EXIT_COVERAGE_FILE = "exit_coverage.json"


def past_key(layer: int) -> str:
    """Name of the key cache that goes into `layer` (absolute layer number)."""
    return f"past_key.{layer}"


def past_value(layer: int) -> str:
    """Name of the value cache that goes into `layer`."""
    return f"past_value.{layer}"


def present_key(layer: int) -> str:
    """Name of the key cache that comes out of `layer`; the same buffer as `past_key`."""
    return f"present_key.{layer}"


def present_value(layer: int) -> str:
    """Name of the value cache that comes out of `layer`."""
    return f"present_value.{layer}"


def past_conv(layer: int) -> str:
    """Name of the rows before a pass that the convolution of recurrent `layer` reads."""
    return f"past_conv.{layer}"


def past_state(layer: int) -> str:
    """Name of the state that goes into the recurrence of `layer`."""
    return f"past_state.{layer}"


def present_conv(layer: int) -> str:
    """Name of the last rows that the convolution of `layer` has read; another buffer than `past_conv`."""
    return f"present_conv.{layer}"


def present_state(layer: int) -> str:
    """Name of the state that comes out of the recurrence of `layer`; another buffer than `past_state`."""
    return f"present_state.{layer}"


def fed_conv(layer: int) -> str:
    """Name of the rows that a pass gives to the convolution of `layer`."""
    return f"{FED}conv.{layer}"


def fed_key(layer: int) -> str:
    """Name of the keys that a pass gives to the recurrence of `layer`."""
    return f"{FED}key.{layer}"


def fed_value(layer: int) -> str:
    """Name of the values that a pass gives to the recurrence of `layer`."""
    return f"{FED}value.{layer}"


def fed_decay(layer: int) -> str:
    """Name of the logs of the decays that a pass gives to the recurrence of `layer`."""
    return f"{FED}decay.{layer}"


def fed_rate(layer: int) -> str:
    """Name of the rates that a pass gives to the recurrence of `layer`."""
    return f"{FED}rate.{layer}"


FED_NAMES = (fed_conv, fed_key, fed_value, fed_decay, fed_rate)
"""What a pass gives to the recurrence of a layer, in the order of contracts."""


def new_key(layer: int) -> str:
    """Name of the key rows that one draft pass adds in `layer`."""
    return f"new_key.{layer}"


def new_value(layer: int) -> str:
    """Name of the value rows that one draft pass adds in `layer`."""
    return f"new_value.{layer}"


def is_new(name: str) -> bool:
    """Whether a draft's port brings new keys or values, which the cache takes over."""
    return name.startswith("new_")


def stream_adapter_down(place: int) -> str:
    """Name of the first matrix of the streams' adapter before their layer `place`; behind the last one for all."""
    return f"adapters.{place}.down.weight"


def stream_adapter_up(place: int) -> str:
    """Name of that adapter's second matrix."""
    return f"adapters.{place}.up.weight"


def adapter_down(layer: int) -> str:
    """Tensor name of the exit adapter's down projection `[rank, H]` after `layer` layers."""
    return f"layers.{layer}.down.weight"


def adapter_up(layer: int) -> str:
    """Tensor name of the exit adapter's up projection `[H, rank]` after `layer` layers."""
    return f"layers.{layer}.up.weight"


def tap(layer: int) -> str:
    """Name of the hidden states after `layer` layers; one more than there are: behind the final norm."""
    return f"tap.{layer}"


def segment_names(num_segments: int) -> tuple[str, ...]:
    """Names of the target's segments in order: `prefix`, (`middle`, ...), `suffix`.

    >>> segment_names(2), segment_names(3)
    (('prefix', 'suffix'), ('prefix', 'middle', 'suffix'))
    """
    if num_segments == 3:
        return ("prefix", "middle", "suffix")
    return ("prefix", *(f"middle{i}" for i in range(1, num_segments - 1)), "suffix")


def stage_file(stage: str) -> str:
    """Path of a target stage inside the bundle."""
    return f"{TARGET_FOLDER}/{stage}.onnx"


def exit_name(layer: int) -> str:
    """Name of the exit stage after `layer` layers."""
    return f"exit{layer}"


def head_name(kind: str) -> str:
    """Name of the stage that is a head."""
    return f"head-{kind}"
