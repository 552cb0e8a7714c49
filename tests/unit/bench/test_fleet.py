"""The fleet that is simulated: few people need one PC, more need more, and PCs that die lose no answers."""

import json
from pathlib import Path

import pytest

from mirrorsd.bench.claims.serving import fleet
from mirrorsd.bench.claims.serving.fleet import Fleet, Simulation, lengths_of, policy_of

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")
"""Ray's own, where it is installed."""


def simulated(**settings: float) -> dict[str, float]:
    _, policy = policy_of(4.0)
    return Simulation(Fleet(**settings), lengths_of(None, 200.0), policy).run()  # type: ignore[arg-type]


def test_people_need_pcs_in_proportion() -> None:
    few, many = (simulated(users=users, seconds=1800.0) for users in (10, 400))
    assert few["pcs_most"] == 1
    assert 3 <= many["pcs_mean"] <= 8
    assert many["answers"] == pytest.approx(40 * few["answers"], rel=0.2)


def test_pcs_that_die_are_replaced_and_their_answers_go_on() -> None:
    alive = simulated(users=400, seconds=1800.0, hours_to_failure=1e9)
    dying = simulated(users=400, seconds=1800.0, hours_to_failure=0.1)
    assert (alive["pcs_died"], alive["answers_interrupted"]) == (0, 0)
    assert dying["pcs_died"] > 5
    assert dying["answers_interrupted"] > 5
    assert dying["answers"] == pytest.approx(alive["answers"], rel=0.1)


def test_speeds_between_two_that_were_measured_are_between_them() -> None:
    some = Fleet(users=1)
    assert [round(some.speed(count) * count) for count in (1, 2, 4, 6, 8, 9)] == [177, 226, 324, 398, 472, 472]


def test_the_report_says_whose_policy_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "fleet.json"
    monkeypatch.setattr("sys.argv", ["fleet.py", "--users", "10", "--seconds", "60", "--output", str(report)])
    fleet.main()
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["policy"] in ("its documented formula", "Ray Serve's own")
    assert found["rows"][0]["users"] == 10
