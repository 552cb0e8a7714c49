"""What tuning found, in a sentence."""

from types import SimpleNamespace
from typing import Any

from mirrorsd.cli.output.tune_report import verdict
from mirrorsd.texts.config import SpeculationConfig


def contest(method: str, speed: float) -> Any:
    return SimpleNamespace(method=method, tokens_per_second=speed, speculation=SpeculationConfig(gamma=3, passes=1))


def test_the_fastest_is_told_with_its_settings_and_its_gain() -> None:
    found = verdict("greedy", [contest("plain", 40.0), contest("serial", 60.0), contest("plain", 50.0)])
    assert found == "greedy texts: serial is 1.2 times plain, 60.0 tokens/s (gamma 3, 1 passes, windows worthwhile)"
    assert "8 roots from early" in verdict("sampled", [contest("plain", 40.0), contest("mirror", 60.0)])


def test_where_nothing_pays_it_says_so() -> None:
    assert "drafting every window does not pay" in verdict("greedy", [contest("plain", 40.0), contest("serial", 30.0)])
