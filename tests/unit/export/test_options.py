import subprocess
import sys

import pytest

from mirrorsd.export import ExportOptions
from mirrorsd.export.options import check_exit_layers, resolve_capacities, resolve_context, with_scaling
from mirrorsd.graphs.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_precision": "int3"}, r"draft_precision is 'int3'; supported are fp32, fp16, int8, int4"),
        ({"draft_precision": "int4", "draft_group": 100}, r"group size is 100; allowed: -1, 32, 64, 128"),
        ({"draft_precision": "int8", "draft_data_aware": True}, r"data-aware compression is for int4"),
        ({"draft_data_aware": True}, r"draft_data_aware is for int4; draft_precision is 'fp32'"),
        ({"precision": "int2"}, r"precision is 'int2'; supported are fp32, fp16, bf16, int8, int4"),
        ({"head_precision": "int2"}, r"head_precision is 'int2'; supported are auto, fp32"),
        (
            {"precision": "int8", "embedding_precision": "bf16"},
            r"embedding_precision is 'bf16' .* but the stages compute in fp32; choose fp32, int8 or int4",
        ),
        (
            {"precision": "int4", "compute": "fp16", "head_precision": "fp32"},
            r"head_precision is 'fp32' with precision 'int4', but the stages compute in fp16",
        ),
        ({"precision": "fp32", "compute": "fp16"}, r"compute is 'fp16' with precision 'fp32', which computes in fp32"),
        ({"precision": "file", "compute": "fp16"}, r"compute is 'fp16' with precision 'file'.* int8 and int4 leave"),
        ({"compute": "int8"}, r"compute is 'int8'; supported are auto, fp32, fp16, bf16"),
        ({"block_size": 16}, r"block_size is 16; supported are 128, 64, 32"),
        ({"precision": "file", "head_precision": "int8"}, r"head and embedding are as they are in the GGUF file"),
        ({"precision": "file", "embedding_precision": "fp32"}, r"leave head_precision and embedding_precision alone"),
        ({"rounding": "gptq"}, r"rounding is 'gptq' with precision 'int8'; it is for int4 layers"),
        ({"products": "integer", "precision": "int4"}, r"products is 'integer', which is for symmetric int8 layers"),
        ({"products": "integer", "block_size": 64}, r"products is 'integer'.*block_size 64"),
        ({"products": "rows"}, r"products is 'rows'; supported are auto, integer, blocks"),
        ({"rounding": "up"}, r"rounding is 'up'; supported are nearest, gptq"),
        ({"context": 10}, r"context is 10; at least 64"),
        (
            {"exit_layers": (4, 2)},
            r"exit_layers is \(4, 2\); give one or more different numbers above 0 in rising order",
        ),
        ({"exit_layers": ()}, r"exit_layers is \(\)"),
        ({"capacities": (512, 256)}, r"capacities is \(512, 256\)"),
        ({"buckets": ((8, 9),)}, r"every \(rows, tips\) needs 1 <= tips <= rows"),
        ({"num_exit_candidates": 0}, r"num_exit_candidates is 0"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportOptions(**settings)  # type: ignore[arg-type]


def test_exit_layers_are_checked() -> None:
    check_exit_layers("auto", 2)
    check_exit_layers((2, 5), 6)
    with pytest.raises(ConfigError, match=r"exit layer is 6; this target allows 1\.\.5"):
        check_exit_layers((3, 6), 6)
    with pytest.raises(ConfigError, match="the target has 1 layer"):
        check_exit_layers("auto", 1)


def test_context_is_what_both_models_were_made_for() -> None:
    assert resolve_context(None, by_target=40960, by_draft=32768) == 2048
    assert resolve_context(None, by_target=1024, by_draft=512) == 512
    assert resolve_context(4096, by_target=40960, by_draft=32768) == 4096
    with pytest.raises(ConfigError, match="context is 4096; the draft was made for 2048 positions"):
        resolve_context(4096, by_target=8192, by_draft=2048)


def test_last_capacity_is_the_context() -> None:
    assert resolve_capacities((256, 512, 1024, 2048), 2048) == (256, 512, 1024, 2048)
    assert resolve_capacities((256, 512, 1024, 2048), 200) == (200,)


def test_options_need_no_torch() -> None:
    code = "import sys; from mirrorsd.export import ExportOptions; ExportOptions(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_goes_up_to_the_end_whether_or_not_inputs_are_scaled() -> None:
    told: list[float] = []
    report = with_scaling(lambda stage, fraction: told.append(fraction))
    given = [number / 100 for number in range(101)]
    for fraction in given:
        report("stage", fraction)
    assert told == sorted(told) and (told[0], told[-1]) == (0.0, 1.0)
    assert told[2] - told[1] == pytest.approx(0.23), "scaling is a quarter of it"
