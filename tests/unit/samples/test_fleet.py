"""What the sample on Ray Serve reserves, asked of a stand-in of Ray; `tests/ray` runs it with the real one."""

import importlib.util
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest


def test_one_pc_holds_a_replica_and_the_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its defaults a replica reserves every core: what else reserved some would wait for ever."""
    serve, reserved = MagicMock(), {}

    def deployment(**options):
        def record(cls):
            cls.bind, cls.options = MagicMock(), lambda **more: record_options(cls, {**options, **more})
            return record_options(cls, options)

        return record

    def record_options(cls, options):
        reserved[cls.__name__] = options.get("num_replicas", 1) * options.get("ray_actor_options", {}).get(
            "num_cpus", 1
        )
        return cls

    serve.deployment, serve.ingress = deployment, lambda: lambda cls: cls
    for name in ("ray", "ray.serve.config", "ray.util", "ray.util.metrics"):
        monkeypatch.setitem(sys.modules, name, MagicMock(serve=serve))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(sys, "argv", ["fleet.py", "pair.mirror"])
    path = Path(__file__).parents[3] / "samples" / "ray_serve" / "fleet.py"
    spec = importlib.util.spec_from_file_location("fleet", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert serve.run.call_count == 2
    assert sorted(reserved) == ["Front", "Replica"]
    assert sum(reserved.values()) == os.cpu_count()
