"""Filtered texts whose rows stay on the device, but for their best: the same text, and hardly a whole row is read."""

from pathlib import Path
from typing import Any

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.devices.onnxruntime import device_memory
from mirrorsd.devices.onnxruntime.device_memory import BestLogits
from mirrorsd.runtime.backends.onnxruntime import bound_pass

SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 3}
FILTERS = ({"top_k": 8}, {"top_k": 12, "top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.6})


@pytest.mark.slow
def test_a_text_is_the_same_whether_whole_rows_are_read_or_their_best(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "NUM_BEST", 24)
    found: list[bool] = []
    judge = bound_pass.short_rows

    def counted(*arguments: Any) -> Any:
        rows = judge(*arguments)
        found.append(rows is not None)
        return rows

    monkeypatch.setattr(bound_pass, "short_rows", counted)
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        whole = [pipe.generate("The old heron", method="serial", **SETTINGS, **chosen) for chosen in FILTERS]
        assert not found, "a processor's rows are read where they lie"
        device = pipe._engine.target_model.device  # type: ignore[attr-defined]
        device.best_logits = BestLogits(pipe.device_map.target)
        with pipe.session() as session:
            for text, chosen in zip(whole, FILTERS, strict=True):
                for method in ("plain", "serial"):
                    found.clear()
                    again = session.generate("The old heron", method=method, **SETTINGS, **chosen)
                    assert again.token_ids == text.token_ids
                    assert found, chosen
                    assert any(found) or "top_p" in chosen
                    assert all(found) or "top_k" not in chosen
