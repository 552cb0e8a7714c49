"""A bundle on every PC of a Ray cluster, behind one address; a text whose PC dies goes on at another.

export RAY_USAGE_STATS_ENABLED=0                       Ray's telemetry is off; on every PC
ray start --head                                       on the first PC; on the others: ray start --address=FIRST:6379
python samples/ray_serve/fleet.py /shared/pair.mirror  then ask http://127.0.0.1:8000/v1

See docs/scale-out.md.
"""

import argparse
import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.util.metrics import Gauge

from mirrorsd.server import ServerSettings, build_app, named_folders
from mirrorsd.server.front import build_front

BY_SESSION = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


@serve.deployment(max_queued_requests=64, graceful_shutdown_timeout_s=30)
@serve.ingress()
class Replica:
    """`mirrorsd serve` without a server of its own: Ray brings the requests, says who is healthy, shows the metrics."""

    async def __init__(self, bundles: list[str], seats: int) -> None:
        self._app = build_app(named_folders(bundles), ServerSettings(seats=seats))
        await self._app.state.service.start()
        self._gauges: dict[str, Gauge] = {}

    def __serve_build_asgi_app__(self):
        return self._app

    def check_health(self) -> None:
        """Ray asks every few seconds: a replica that cannot answer is replaced. What is counted goes to Ray, too."""
        service = self._app.state.service
        if service.status not in ("ok", "closing"):
            raise RuntimeError(f"The server is {service.status}.")
        for name, labels, value in service.metrics.samples():
            known = self._gauges.setdefault(name, Gauge(name, tag_keys=tuple(labels)))
            known.set(value, tags=labels)


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
@serve.ingress()
class Front:
    """Keeps the ids of running texts, and asks the replicas through Ray's own router.

    It reserves no core: a replica has all of its PC, and on one PC there would be no place for a front.
    """

    def __serve_build_asgi_app__(self):
        return build_front(["http://127.0.0.1:8000/replicas"], ServerSettings())


def main() -> None:
    """Deploy, and stay until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", help="folders, the same on every PC, or NAME=FOLDER")
    parser.add_argument(
        "--cores", type=float, default=os.cpu_count(), help="of a replica; with all of a PC's, one fits"
    )
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of memory for a replica")
    parser.add_argument("--seats", type=int, default=8, help="conversations at once in a replica")
    parser.add_argument("--replicas", type=int, nargs=2, default=(1, 64), help="fewest and most")
    given = parser.parse_args()
    replica = Replica.options(
        ray_actor_options={"num_cpus": given.cores, "memory": given.gigabytes * 2**30},
        max_ongoing_requests=given.seats,
        request_router_config=RequestRouterConfig(request_router_class=BY_SESSION),
        autoscaling_config={
            **{"min_replicas": given.replicas[0], "max_replicas": given.replicas[1]},
            "target_ongoing_requests": given.seats / 2,
        },
    )
    serve.run(replica.bind(given.bundles, given.seats), name="replicas", route_prefix="/replicas")
    serve.run(Front.bind(), name="front", route_prefix="/", blocking=True)


if __name__ == "__main__":
    main()
