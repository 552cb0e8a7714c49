"""Device cards: the built-in ones, and everything that a card of one's own can get wrong."""

from pathlib import Path

import pytest

from mirrorsd.device_maps import DeviceMap, DraftPlacement, SpeculationDefaults, builtin_names, load_device_map
from mirrorsd.devices.layouts import Cores, lay_out
from mirrorsd.graphs.errors import ConfigError


def write_card(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_builtin_names() -> None:
    assert {"cpu", "npu-emulated", "cuda-npu", "cuda-cpu"} <= set(builtin_names())


@pytest.mark.parametrize("name", builtin_names())
def test_builtin_cards_load_and_say_what_they_are(name: str) -> None:
    card = load_device_map(name)
    assert card.name == name
    assert card.description
    assert set(card.fallbacks) <= set(builtin_names())


def test_cpu_card_gives_each_side_a_core() -> None:
    card = load_device_map("cpu")
    apart = lay_out(card, "apart", Cores((2, 4, 6), 3))
    assert (apart.target.provider, apart.target.cores, apart.target.threads) == ("CPUExecutionProvider", (2,), 1)
    assert (apart.draft.device, apart.draft.cores, apart.draft.threads) == ("CPU", (4,), 1)
    assert lay_out(card, "apart", Cores((3,), 1)) == card, "nobody keeps to a core that both need"
    assert card.target.is_on_cpu
    assert card.draft.is_on_cpu


def test_only_the_cpu_card_may_share_its_cores() -> None:
    assert load_device_map("cpu").layouts == ("shared", "apart")
    assert {load_device_map(name).layouts for name in builtin_names() if name != "cpu"} == {("apart",)}


def test_emulated_npu_is_an_npu_on_the_cpu() -> None:
    draft = load_device_map("npu-emulated").draft
    assert (draft.device, draft.emulated, draft.is_on_cpu) == ("NPU", True, True)


def test_cuda_npu_card_uses_no_core() -> None:
    card = load_device_map("cuda-npu")
    assert not card.target.is_on_cpu
    assert not card.draft.is_on_cpu


def test_own_card_by_path_with_defaults(tmp_path: Path) -> None:
    card = load_device_map(write_card(tmp_path, 'fallbacks = ["cpu"]\n[draft]\nthreads = 2\ncores = [2, 3]\n'))
    assert card == DeviceMap(name="mine", draft=DraftPlacement(threads=2, cores=(2, 3)), fallbacks=("cpu",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[draft]\nprecison = "f32"', r"unknown key 'draft.precison'; did you mean 'draft.precision'\? Known: .*"),
        ('[drafts]\ndevice = "CPU"', r"unknown key 'drafts'; did you mean 'draft'\?"),
        ("qqq = 1", r"unknown key 'qqq'. Known: name, description"),
        ("draft = 3", r"draft is 3; expected a table \[draft\]"),
        ("[draft]\nthreads = true", "draft.threads is True; expected a whole number"),
        ("[draft]\nthreads = 1.0", "draft.threads is 1.0; expected a whole number"),
        ("[draft]\nemulated = 1", "draft.emulated is 1; expected true or false"),
        ("[draft]\ndevice = 1", "draft.device is 1; expected text"),
        ("[target]\ncores = 0", "target.cores is 0; expected a list"),
        ('[target]\ncores = ["a"]', r"target.cores\[0\] is 'a'; expected a whole number"),
        ("[target]\ncores = [1, 1]", r"target.cores is \[1, 1\]; allowed: different core numbers"),
        ("[target]\ncores = [-1]", r"target.cores is \[-1\]"),
        ("[target]\ncores = [0]\nthreads = 2", r"target.cores has 1 core\(s\) for 2 threads"),
        ("[target]\nthreads = 0", "target.threads is 0; allowed: 1 to 256"),
        ('[target]\nprovider = "Cuda"', "target.provider is 'Cuda'; allowed: 'CPUExecutionProvider', "),
        ('[target]\nruntime = "torch"', "target.runtime is 'torch'; allowed: 'onnxruntime'"),
        (
            '[target]\nruntime = "openvino"\nprovider = "CUDAExecutionProvider"',
            "target.provider is 'CUDAExecutionProvider' with runtime 'openvino'; say target.device",
        ),
        ('[target]\ndevice = "GPU"', "target.device and target.precision are for runtime 'openvino'"),
        ('[target]\nruntime = "openvino"\ndevice = "TPU"', "target.device is 'TPU'; allowed: 'CPU', 'GPU'"),
        ('[draft]\ndevice = "GPU"', "draft.device is 'GPU'; allowed: 'CPU', 'NPU'"),
        ('[draft]\nprecision = "int4"', "draft.precision is 'int4'; allowed: 'f32'"),
        ('[draft]\ndevice = "NPU"\nprecision = "f32"', "draft.precision is 'f32'; allowed: 'f16', 'auto'"),
        ('[exit]\ndevice = "NPU"\nprecision = "bf16"', "exit.precision is 'bf16'; allowed: 'f16', 'auto'"),
        ("[target]\ndevice_id = 1", "device_id is 1; devices of CPUExecutionProvider have no numbers"),
        (
            '[target]\nprovider = "WebGpuExecutionProvider"\ndevice_id = 1',
            "device_id is 1; devices of WebGpuExecutionProvider have no numbers",
        ),
        ('name = "a/b"', "name is 'a/b'; it is part of the names of files"),
        (f'name = "{"n" * 101}"', "at most 100 characters"),
        ("[draft]\nemulated = true", "only 'NPU' can be emulated"),
        ("[speculation]\ngamma = 0", "speculation.gamma is 0; allowed: 1 to "),
        ('[speculation]\nallocation = "best"', "speculation.allocation is 'best'; allowed: 'global', 'per_row'"),
        ('[speculation]\nwindow = "long"', "speculation.window is 'long'; allowed: 'full', 'worthwhile'"),
        ('fallbacks = ["mine"]', "fallbacks of 'mine' name the card itself"),
        ("layouts = []", r"layouts is \[\]; allowed: one or more of 'apart', 'shared'"),
        ('layouts = ["apart", "apart"]', r"layouts is \['apart', 'apart'\]; allowed"),
        ('layouts = ["both"]', r"layouts is \['both'\]; allowed: one or more of 'apart', 'shared'"),
        (
            'layouts = ["shared"]\n[draft]\ndevice = "NPU"',
            "layouts has 'shared', but target and draft do not both compute on the processor",
        ),
        ("shared_cores = [0, 1]", r"shared_cores is \[0, 1\], but layouts has no 'shared'"),
        ('layouts = ["shared"]\nshared_cores = [1, 1]', r"shared_cores is \[1, 1\]; allowed: different"),
        ('name = ""', "name is empty"),
        ("[draft", "is not a valid TOML file"),
        ("[pace]\ntarget_ms = [[1.0, nan]]\ndraft_ms = [[1.0, 1.0]]", r"is not a valid TOML file \(nan is no number"),
        ("[pace]\nexit_ms = inf", r"\(inf is no number here\)"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_device_map(write_card(tmp_path, text))
    assert "mine.toml" in str(caught.value)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"Unknown device map 'npu-emulatd'; did you mean 'npu-emulated'\? .* Built in: arrow-lake, "
    ):
        load_device_map("npu-emulatd")


@pytest.mark.parametrize("name", ["../cpu", "cpu/../cpu", "", "CPU "])
def test_names_are_not_paths(name: str) -> None:
    with pytest.raises(ConfigError, match="Unknown device map"):
        load_device_map(name)


def test_missing_card_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no device map file"):
        load_device_map(str(tmp_path / "none.toml"))


def test_card_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_device_map(str(path))


def test_checks_hold_without_a_file_too() -> None:
    with pytest.raises(ConfigError, match=r"speculation[.]roots is 200; allowed: 0 to 128"):
        SpeculationDefaults(roots=200)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cuda", "did you mean 'cuda-cpu' or 'cuda-npu'?"),
        ("NPU", "did you mean 'cuda-npu' or"),
        ("gpu", "'gpu'. `mirrorsd devices` says which fit this machine."),
    ],
)
def test_a_device_is_answered_with_the_cards_that_have_it_and_never_with_another_one(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_device_map(name)
    assert hint in str(caught.value)


def test_an_npu_computes_in_halves_if_nothing_is_said(tmp_path: Path) -> None:
    assert load_device_map(write_card(tmp_path, '[draft]\ndevice = "NPU"\n')).draft.precision == "f16"
    emulated = load_device_map(write_card(tmp_path, '[draft]\ndevice = "NPU"\nemulated = true\n'))
    assert (emulated.draft.precision, DraftPlacement().precision) == ("f32", "f32")
