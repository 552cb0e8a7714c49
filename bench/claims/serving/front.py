"""Where a front saturates: chunks and requests per second through one process, before servers that cost nothing.

    python bench/claims/serving/front.py --output front.json

The servers are made up: they send a chunk with its mark as soon as the one before is gone, without any model. Front,
servers and clients are processes of their own, so the cores that they share are named in the report.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from mirrorsd.cli.output.machine import describe_machine
from mirrorsd.server import ServerSettings, run
from mirrorsd.server.front import build_front

_ABOUT = {"id": f"chatcmpl-{0:032x}", "created": 1, "fingerprint": "made-up", "seed": None}
_CHUNK = {
    "id": _ABOUT["id"],
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": " word"}}],
}
_START_S = 30.0


def main() -> None:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="open at once")
    parser.add_argument("--chunks", type=int, default=200, help="of a stream")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    ports = [_free_port() for _ in range(2)]
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=_server, args=(ports[0],)), start(target=_front, args=(ports[1], ports[0]))]
    for process in processes:
        process.start()
    try:
        for port in ports:
            _wait_for(port)
        report: dict[str, Any] = {"machine": describe_machine(), "cores": os.cpu_count(), "streams": given.streams}
        for name, port in (("server", ports[0]), ("front", ports[1])):
            for what, chunks in (("chunks", given.chunks), ("requests", 1)):
                rate = asyncio.run(_load(port, given.streams, chunks, given.seconds))
                report[f"{name}_{what}_per_second"] = round(rate * (chunks if what == "chunks" else 1))
    finally:
        for process in processes:
            process.terminate()
            process.join()
    print(json.dumps(report, indent=1))
    if given.output is not None:
        given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


async def _made_up(request: Request) -> StreamingResponse:
    count = int((await request.json())["max_tokens"])

    async def frames() -> AsyncIterator[bytes]:
        yield b": mirrorsd " + json.dumps(_ABOUT).encode() + b"\n\n"
        for number in range(count):
            mark = {"choice": 0, "ids": [number], "num_ended": int(number == count - 1)}
            chunk, told = (json.dumps(part, separators=(",", ":")).encode() for part in (_CHUNK, mark))
            yield b"data: " + chunk + b"\n\n: mirrorsd " + told + b"\n\n"
            await asyncio.sleep(0)
        yield b'data: [DONE]\n\n: mirrorsd {"is_done":true}\n\n'

    return StreamingResponse(frames(), media_type="text/event-stream")


def _server(port: int) -> None:
    app = Starlette(routes=[Route("/v1/chat/completions", _made_up, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="error")


def _front(port: int, server: int) -> None:
    settings = ServerSettings(port=port)
    run(build_front([f"http://127.0.0.1:{server}"], settings), settings, lambda _: None)


async def _load(port: int, streams: int, chunks: int, seconds: float) -> float:
    """Answers per second."""
    until, done = perf_counter() + seconds, [0]
    started = perf_counter()
    await asyncio.gather(*(_client(port, chunks, until, done) for _ in range(streams)))
    return done[0] / (perf_counter() - started)


async def _client(port: int, chunks: int, until: float, done: list[int]) -> None:
    body = json.dumps({"stream": True, "max_tokens": chunks, "messages": [{"role": "user", "content": "x"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    while perf_counter() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read(-1)
        writer.close()
        assert answer.count(b" word") == chunks, answer[:300]
        done[0] += 1


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: int) -> None:
    until = perf_counter() + _START_S
    while perf_counter() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return


if __name__ == "__main__":
    main()
