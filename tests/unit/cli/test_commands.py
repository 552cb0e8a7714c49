"""The sub-commands through the real entry point, with a scripted pipeline behind them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.cli.application import run
from mirrorsd.cli.commands.machine import doctor
from mirrorsd.cli.commands.machine.doctor import SelfTest, check_cards, check_cores, check_flavours
from mirrorsd.device_maps import load_device_map
from mirrorsd.graphs.chat_defaults import chat_defaults
from mirrorsd.graphs.manifest import with_checksum

STATS_FIELDS = {
    *("steps", "tokens_per_step", "mean_accepted", "num_drafted", "draft_right", "reuse_rate", "reuse_by_source"),
    *("draft_exposed_ms", "overlap", "step_ms", "near_ties"),
}
ROW_FIELDS = {
    *("method", "category", "tokens_per_second", "tokens_per_step"),
    *("prefill_ms", "time_to_first_token_ms", "num_prompt_tokens"),
    *("mean_accepted", "draft_right", "times_plain", "reuse_rate", "draft_exposed_ms", "overlap"),
}


def same_answer(method: str, text: str) -> list[int]:
    return [1, 2, 3]


def test_generate_streams_text_and_notes_the_speed(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use_pipeline(same_answer)
    assert run(["generate", "b.mirror", "Once"]) == 0
    out, err = capsys.readouterr()
    assert out == "<1><2><3>\n"
    assert err == (
        "3 tokens, 100.0 tokens/s, 2.5 times plain | draft right 25% | prompt 5 tokens in 0.01 s | "
        "ended: cut off at --max-new-tokens\n"
    )


def test_placement_is_told_with_v_only(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use_pipeline(same_answer)
    assert run(["generate", "b.mirror", "Once", "-v"]) == 0
    assert "draft: there" in capsys.readouterr().err
    assert run(["compare", "b.mirror"]) == 0
    assert "draft: there" not in capsys.readouterr().err


def test_without_a_prompt_a_terminal_opens_the_chat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    opened: list[tuple[Path, dict[str, Any]]] = []
    command = SimpleNamespace(chat=lambda _, bundle, **asked: opened.append((bundle, asked)))
    monkeypatch.setitem(sys.modules, "mirrorsd.cli.commands.chat", command)
    assert run(["generate", str(tmp_path)]) == 2
    assert "This model has no chat template" in capsys.readouterr().err
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert run(["generate", str(tmp_path), "--temperature", "0.7", "--method", "serial"]) == 0
    assert opened[0][0] == tmp_path
    assert (opened[0][1]["temperature"], opened[0][1]["method"], opened[0][1]["device_map"]) == (0.7, "serial", "auto")


def test_a_card_that_nobody_has_tried_is_not_picked_in_silence(
    use_pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    use_pipeline(same_answer).device_map = load_device_map("igpu-cpu")
    assert run(["generate", "b.mirror", "Once"]) == 0
    assert "auto picks igpu-cpu here, a device map that was never tried" in capsys.readouterr().err
    assert run(["generate", "b.mirror", "Once", "--device-map", "igpu-cpu"]) == 0
    assert "never tried" not in capsys.readouterr().err


def test_the_chat_template_is_used_where_there_is_one(use_pipeline: Any, tmp_path: Path) -> None:
    pipeline = use_pipeline(same_answer)
    folder = tmp_path / "chat.mirror"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    for command in ([str(folder), "Hi"], [str(folder), "Hi", "--raw"], [str(tmp_path), "Hi"]):
        assert run(["generate", *command]) == 0
    assert [(prompt, messages) for prompt, messages, _ in pipeline.requests] == [
        (None, [{"role": "user", "content": "Hi"}]),
        ("Hi", None),
        ("Hi", None),
    ]


def test_generate_json_has_exactly_the_documented_fields(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use_pipeline(same_answer)
    assert run(["generate", "b.mirror", "Once", "--method", "mirror", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    fields = {"text", "token_ids", "num_tokens", "method", "device_map", "layout", "seconds", "tokens_per_second"}
    fields |= {"num_prompt_tokens", "num_reused_tokens", "stop_reason", "prefill_ms", "time_to_first_token_ms"}
    assert set(document) == fields | {"stats", "seed", "warnings", "plain_tokens_per_second", "times_plain"}
    assert (document["times_plain"], document["stats"]["draft_right"]) == (2.5, 0.25)
    assert (document["seed"], document["stop_reason"]) == (None, "length")
    assert set(document["stats"]) == STATS_FIELDS
    assert (document["text"], document["num_tokens"], document["method"]) == ("<1><2><3>", 3, "mirror")


def test_generate_hands_every_option_on(use_pipeline: Any) -> None:
    pipeline = use_pipeline(same_answer)
    text_options = "--temperature 0.8 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --seed 7 --stop END"
    speed_options = "-S gamma=4 -S roots=16 -S allocation=per_row --set root-source=proxy --device-map cpu"
    more = "--stop FIN --max-new-tokens 9 --ignore-eos --layout shared"
    assert run(["generate", "b.mirror", "Hi", *f"{text_options} {speed_options} {more}".split()]) == 0
    assert pipeline.loaded == (
        Path("b.mirror"),
        "cpu",
        {"gamma": 4, "roots": 16, "allocation": "per_row", "root_source": "proxy"},
    )
    assert pipeline.layout == "shared"
    prompt, messages, config = pipeline.requests[0]
    assert (prompt, messages) == ("Hi", None)
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.8, 5, 0.9, 0.1)
    assert (config.repetition_penalty, config.seed, config.stop_strings) == (1.2, 7, ("END", "FIN"))
    assert (config.max_new_tokens, config.ignore_eos) == (9, True)


def test_a_seed_that_was_drawn_is_told(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = use_pipeline(same_answer)
    assert run(["generate", "b.mirror", "Once", "--temperature", "1", "--json"]) == 0
    seed = json.loads(capsys.readouterr().out)["seed"]
    assert seed == pipeline.requests[0][2].seed
    assert run(["generate", "b.mirror", "Once", "--temperature", "1", "--seed", str(seed)]) == 0
    assert f" | seed {seed}\n" in capsys.readouterr().err


def test_sampling_options_without_sampling_are_a_usage_error(
    use_pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    use_pipeline(same_answer)
    assert run(["generate", "b.mirror", "Once", "--top-p", "0.9"]) == 2
    assert "this text is not sampled: give a temperature" in capsys.readouterr().err
    assert run(["generate", "b.mirror", "Once", "--greedy", "--temperature", "0.5"]) == 2
    assert "Both --greedy and --temperature 0.5 are given" in capsys.readouterr().err


def test_the_checkpoint_s_defaults_are_taken_unless_greedy_says_no(use_pipeline: Any) -> None:
    pipeline = use_pipeline(same_answer)
    pipeline.manifest.generation = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    for options in ([], ["--greedy"], ["--temperature", "0"]):
        assert run(["generate", "b.mirror", "Once", *options]) == 0
    configs = [config for _, _, config in pipeline.requests]
    assert [(config.temperature, config.top_k) for config in configs] == [(0.6, 20), (0.0, 0), (0.0, 0)]


def test_a_question_is_sampled_as_a_chat_and_a_raw_text_is_not(
    use_pipeline: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = use_pipeline(same_answer)
    pipeline.chat = chat_defaults("llama", {}).generation
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    asked = ([], ["--raw"], ["--greedy"], ["--temperature", "0"], ["--seed", "7"], ["--temperature", "0.5"])
    for options in asked:
        assert run(["generate", str(tmp_path), "Hi", *options]) == 0
    configs = [config for _, _, config in pipeline.requests]
    assert [config.temperature for config in configs] == [0.8, 0.0, 0.0, 0.0, 0.8, 0.5]
    assert [config.min_p for config in configs] == [0.05, 0.0, 0.0, 0.0, 0.05, 0.0]
    assert configs[4].seed == 7 and f" | seed {configs[0].seed}\n" in capsys.readouterr().err


def test_compare_draws_one_seed_for_all_methods_and_tells_it(
    use_pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = use_pipeline(same_answer)
    assert run(["compare", "b.mirror", "--temperature", "1", "--json"]) == 0
    assert len({config.seed for _, _, config in pipeline.requests}) == 1
    assert len(pipeline.requests) > 3
    assert f"seed: {pipeline.requests[0][2].seed}\n" in capsys.readouterr().err


def test_trace_is_written_after_the_text(use_pipeline: Any, tmp_path: Path) -> None:
    use_pipeline(same_answer)
    path = tmp_path / "trace.json"
    assert run(["generate", "b.mirror", "Once", "--json", "--trace", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == "trace"


def test_paced_comparison_says_so(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use_pipeline(same_answer).device_map = load_device_map("paced-laptop")
    assert run(["compare", "b.mirror", "--methods", "plain"]) == 0
    assert "PACED: the times are those of the card paced-laptop" in capsys.readouterr().out


def test_compare_json(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use_pipeline(same_answer)
    assert run(["compare", "b.mirror", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"bundle", "device_map", "layout", "ends", "machine", "versions", "identical", "rows"}
    assert (document["identical"], document["ends"]) == (True, "honoured")
    assert [row["method"] for row in document["rows"]] == ["plain", "serial", "mirror", "auto"]
    assert {row["category"] for row in document["rows"]} == {"all"}
    assert all(set(row) == ROW_FIELDS for row in document["rows"])


def test_a_comparison_past_the_end_of_text_says_so(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use_pipeline(same_answer)
    command = ["compare", "b.mirror", "--ignore-eos", "--methods", "plain"]
    assert run(command) == 0
    assert "END OF TEXT IGNORED" in capsys.readouterr().out
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ends"] == "ignored"


def test_every_method_of_a_comparison_reads_every_prompt_itself(use_pipeline: Any) -> None:
    pipeline = use_pipeline(same_answer)
    assert run(["compare", "b.mirror", "--methods", "plain,mirror", "--category", "story", "--repeats", "3"]) == 0
    assert pipeline.num_sessions == 2
    assert pipeline.num_forgotten == 2 * (1 + 2 * 3)  # one untimed question, and two questions three times


def test_a_sampled_comparison_has_one_seed_for_all_methods(use_pipeline: Any) -> None:
    pipeline = use_pipeline(same_answer)
    assert run(["compare", "b.mirror", "--temperature", "1"]) == 0
    seeds = {config.seed for _, _, config in pipeline.requests}
    assert len(seeds) == 1
    assert None not in seeds


def test_compare_rows_of_one_category(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = use_pipeline(same_answer)
    command = ["compare", "b.mirror", "--json", "--category", "dialogue", "--methods", "plain", "--raw"]
    assert run(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["category"] for row in rows] == ["dialogue", "all"]
    prompts = [prompt for prompt, messages, _ in pipeline.requests if messages is None]
    assert prompts[1].startswith(f"{prompts[0]}\n\n<1><2><3>\n\n")


def test_compare_prints_tables_and_the_verdict(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use_pipeline(same_answer)
    assert run(["compare", "b.mirror", "--methods", "plain,mirror"]) == 0
    out = capsys.readouterr().out
    assert "times plain" in out
    assert "story" not in out
    assert out.endswith("mirror is 1.0 times plain here; all texts identical.\n")
    assert run(["compare", "b.mirror", "--methods", "plain,mirror", "--by-category"]) == 0
    assert "story" in capsys.readouterr().out


def test_a_comparison_takes_every_option_for_the_text(use_pipeline: Any) -> None:
    pipeline = use_pipeline(same_answer)
    text_options = "--temperature 0.8 --min-p 0.1 --repetition-penalty 1.2 --seed 7 --stop END"
    assert run(["compare", "b.mirror", *text_options.split()]) == 0
    config = pipeline.requests[-1][2]
    assert (config.min_p, config.repetition_penalty, config.stop_strings) == (0.1, 1.2, ("END",))


def test_compare_says_where_texts_differ(use_pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    use_pipeline(lambda method, text: [1, 2, 9] if method == "mirror" else [1, 2, 3])
    assert run(["compare", "b.mirror", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["identical"] is False
    assert "mirror differs from plain at token 2" in err


def test_inspect(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert "tiny-target" in out
    assert "target/suffix.onnx" in out
    assert run(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"]["segments"][0]["name"] == "prefix"


def test_inspect_shows_exit_coverage(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bundle / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    shares = {"untrained": {"1": 0.25, "8": 0.5}, "adapter": {"1": 0.5, "8": 0.915}}
    document["exit_coverage"] = {"text": "held back", "positions": 4000, "layers": {"1": shares, "2": "rubbish"}}
    path.write_text(json.dumps(with_checksum(document)), encoding="utf-8")
    assert run(["inspect", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert "Exit coverage (4000 positions)" in out
    assert "91.5%" in out


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["devices", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {card["name"] for card in document["device_maps"] if card["fits"]} >= {"cpu"}
    assert run(["devices"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Ready. ")
    assert f"{document['auto']} (auto)" in out
    assert "CUDAExecutionProvider" not in out
    assert run(["devices", "--all"]) == 0
    assert "CUDAExecutionProvider" in capsys.readouterr().out


def test_doctor_without_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "cpu" in document["device_maps"]
    assert not [name for name in document["device_maps"] if name.startswith("paced")]
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Ready. ")
    assert "ONNX Runtime" not in out, "what is fine is shown with --all"
    assert run(["doctor", "--all"]) == 0
    assert "ONNX Runtime" in capsys.readouterr().out


def test_doctor_names_what_it_tried_and_what_it_did_not(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"load_seconds": 1.0, "plain_tokens_per_second": 9.0, "mirror_tokens_per_second": 9.0}
    tests = [SelfTest(device_map="openvino-cpu", identical=True, **speeds)]
    monkeypatch.setattr(doctor, "try_bundle", lambda bundle, names: tests)
    monkeypatch.setattr(doctor, "check_memory", lambda bundle, name: [])
    reasons = {"cpu": "it lacks a thing"}
    monkeypatch.setattr("mirrorsd.devices.inventory.cannot_run", lambda card, _: reasons.get(card.name, ""))
    assert run(["doctor", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert "Plain and mirror decoding gave the same text on openvino-cpu." in out
    assert "\ncpu was not tried: it lacks a thing.\n" in out


def test_doctor_works_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert run(["doctor"]) == 4
    out = capsys.readouterr().out
    assert out.startswith('Not ready: ONNX Runtime is not installed: pip install "mirrorsd[cpu]"')
    assert "Device maps that fit: openvino-cpu." in out


def test_doctor_s_advice() -> None:
    both = check_flavours({"onnxruntime": "1", "onnxruntime-gpu": "1"})
    assert both.advice.startswith("keep one flavour only: pip uninstall onnxruntime onnxruntime-gpu")
    assert check_flavours({"onnxruntime": "1"}).advice == ""
    assert "expect no gain" in check_cores(1).advice
    assert "no device map fits" in check_cards([]).advice


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mirrorsd ")
