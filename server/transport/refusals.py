"""Requests that are refused before their body was read: the error is told, what still comes is read and forgotten.

Clients read no answer before they have sent all: where the connection ended meanwhile, they would see a broken one.
"""

import asyncio
import json
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
    """Answer with an error, forget the rest of the request, and close the connection."""
    body = json.dumps(error.body, ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    all_headers = [(name.lower().encode(), value.encode()) for name, value in (headers | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await forget_rest(scope, receive, limits)
    await send({"type": "http.response.body", "body": b""})


async def forget_rest(scope: Scope, receive: Receive, limits: Limits) -> None:
    """Read what a client still sends, as long as a body may take; one that waits to be told to sends none.

    One that sends nothing for as long as a head may take has stopped.
    """
    if not any(name == b"expect" for name, _ in scope["headers"]):
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.body_s):
                while (await asyncio.wait_for(receive(), limits.head_s)).get("more_body"):
                    pass
