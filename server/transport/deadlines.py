"""HTTP connections with deadlines: uvicorn has none for a request's head, nor for a client that does not read."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits

LINGER_S = 0.1
"""What is open stays so for a while once the server closes: a client may be asking just now, and would get no word.

`bench/claims/serving/drain.py` counts those that get none."""


class BoundedConnection(H11Protocol):
    """A connection that is cut where its client is too slow, or one too many.

    * A head must have come `head_s` after the connection, or after its first byte where one was answered before.
    * A body that nobody waits for, as the answer is complete, must have come `body_s` later.
    * What is sent must have been taken by the client's system `send_s` later.
    """

    limits = Limits()
    most = limits.connections

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a connection where too many are open, else wait for its first head."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.most:
            self.connections.discard(self)
            message = f"{self.most} connections are open, and no more are taken. Try again later."
            self._tell(ApiError(503, message, code="too_many_connections", headers={"Retry-After": "5"}))
            self.loop.call_later(LINGER_S, transport.close)  # what it asks meanwhile would reset it, unread
            return
        self._head_timer = self.loop.call_later(self.limits.head_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a head, for that of a body, or for the next request."""
        if self.conn.our_state is h11.MUST_CLOSE:  # it was refused
            return
        super().data_received(data)
        is_waiting, has_more = self.conn.their_state is h11.IDLE, bool(self.conn.trailing_data[0])
        if not is_waiting:
            _stop(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None and has_more:
            self._head_timer = self.loop.call_later(self.limits.head_s, self.transport.abort)
        elif self._head_timer is None and not self.transport.is_closing():  # that was the end of a body
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._watch_body()

    def on_response_complete(self) -> None:
        """The answer was complete: what is left of the request's body has its time, whatever comes of it meanwhile."""
        super().on_response_complete()
        self._watch_body()

    def _watch_body(self) -> None:
        is_late = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if not is_late:
            _stop(self._body_timer)
            self._body_timer = None
        elif self._body_timer is None:
            self._body_timer = self.loop.call_later(self.limits.body_s, self.transport.abort)

    def pause_writing(self) -> None:
        """Something is unsent: the client has `send_s` to take it."""
        super().pause_writing()
        _stop(self._send_timer)
        self._send_timer = self.loop.call_later(self.limits.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Everything was sent."""
        super().resume_writing()
        _stop(self._send_timer)
        self._send_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is waited for any more."""
        for timer in (self._head_timer, self._body_timer, self._send_timer):
            _stop(timer)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection when nothing was asked on it for a while."""
        self._linger(idle_with=self)

    def _linger(self, idle_with: object) -> None:
        """Look at it again; it was idle after that request at the last look, if it was."""
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and idle_with is self.cycle:
            super().shutdown()
        else:
            self.loop.call_later(LINGER_S, self._linger, self.cycle if is_idle else self)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too long a head, in OpenAI's form."""
        error = ApiError(400, f"{msg} Heads may have {self.limits.head_bytes} bytes.", code="invalid_http")
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun: nothing fits in any more
            self.transport.abort()
            return
        self._tell(error)
        self.transport.close()

    def _tell(self, error: ApiError) -> None:
        """Answer without the application."""
        body = json.dumps(error.body).encode()
        given = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        head = h11.Response(status_code=error.status, headers=[*(given | error.headers).items()])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def bounded_by(limits: Limits, most: int) -> type[BoundedConnection]:
    """The connection class with these limits, of which so many may be open: uvicorn makes its objects itself."""
    return type("Connection", (BoundedConnection,), {"limits": limits, "most": most})


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
