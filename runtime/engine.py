"""The two devices with their workers: loaded together, closed together, lent to one request at a time."""

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.controller import AutoDriver, CostBook
from mirrorsd.runtime.draft_link import DraftLink
from mirrorsd.runtime.draft_session import DraftSession
from mirrorsd.runtime.drafter import Drafter
from mirrorsd.runtime.drivers import Driver, MirrorDriver, PlainDriver, SerialDriver
from mirrorsd.runtime.generation_config import SpeculationConfig
from mirrorsd.runtime.planner import RootPlanner
from mirrorsd.runtime.request import Request
from mirrorsd.runtime.target_link import TargetLink
from mirrorsd.runtime.target_session import TargetSession
from mirrorsd.runtime.workers import DeviceWorker


class Engine:
    """Target and draft sessions, one worker each.

    The sessions are made on their own workers' threads, so that whatever threads they start stay on their cores.
    """

    def __init__(
        self,
        make_target: Callable[[], TargetSession],
        make_draft: Callable[[], DraftSession],
        *,
        target_cores: tuple[int, ...] = (),
        draft_cores: tuple[int, ...] = (),
    ) -> None:
        self.lock = threading.Lock()
        self._target_worker = DeviceWorker("target", target_cores)
        self._draft_worker = DeviceWorker("draft", draft_cores)
        try:
            target = self._target_worker.submit(make_target)
            draft = self._draft_worker.submit(make_draft)
            self.target_session, self.draft_session = target.result(), draft.result()
        except BaseException:
            self._target_worker.close()
            self._draft_worker.close()
            raise
        self._target = TargetLink(self.target_session, self._target_worker)
        self._drafter = Drafter(self.draft_session)
        self._link: DraftLink | None = None
        self._book = CostBook(("mirror", "serial", "plain"))

    @property
    def context(self) -> int:
        """Most tokens of prompt and new text together."""
        return min(self.target_session.context, self.draft_session.capacity)

    def driver(self, request: Request, method: str) -> Driver:
        """The driver for a request; plain where the draft cannot be used."""
        plain = PlainDriver(request, self._target)
        if method == "plain" or not self._is_draft_ready():
            return plain
        speculation = request.speculation
        link = DraftLink(self._drafter, self._draft_worker, speculation.draft_deadline_s, request.ledger)
        self._link = link
        passes = speculation.passes if self.draft_session.shape.num_streams else request.gamma
        serial = SerialDriver(request, self._target, link, passes)
        if method == "serial":
            return serial
        mirror = MirrorDriver(request, self._target, link, passes, RootPlanner(speculation, request.chooser))
        return mirror if method == "mirror" else AutoDriver(plain, serial, mirror, self._book)

    @property
    def draft_failure(self) -> str | None:
        """Why the draft was given up in the current request."""
        return self._link.failure if self._link else None

    def _is_draft_ready(self) -> bool:
        """Whether the draft answers; one that failed but is not hung starts over with an empty cache."""
        if self._link is None or self._link.failure is None:
            return True
        if self._draft_worker.has_pending():
            warnings.warn(
                f"The draft is still hung ({self._link.failure}); this text is decoded plainly.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._drafter.forget()
        return True

    def close(self) -> None:
        """End both workers and release both devices. A hung draft is left behind on its daemon thread."""
        for worker, session in ((self._draft_worker, self.draft_session), (self._target_worker, self.target_session)):
            if worker.close():
                session.close()


def resolve_speculation(defaults: SpeculationConfig, overrides: Mapping[str, object]) -> SpeculationConfig:
    """The device map's defaults with the caller's values on top.

    Raises:
        ConfigError: unknown name, or a value out of its range.
    """
    unknown = sorted(set(overrides) - set(SpeculationConfig.__dataclass_fields__))
    if unknown:
        allowed = ", ".join(SpeculationConfig.__dataclass_fields__)
        raise ConfigError(f"There is no speculation setting {unknown[0]!r}; there are {allowed}.")
    return replace(defaults, **overrides)  # type: ignore[arg-type]
