"""Streams for event loops: a thread of its own reads each, so that nothing in the loop waits for a device."""

from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


async def stream_in_thread(
    begin: Callable[[], tuple[Iterator[Item], Callable[[], None]]],
) -> AsyncGenerator[Item, None]:
    """Begin an iterator and read it item by item, when asked to, on one thread that ends with it.

    Where this generator is closed or its task cancelled in the middle of an item, what `begin` gives beside the
    iterator is called, so that the item ends early. Then the iterator is closed on its own thread.
    """
    import asyncio  # 30 ms of every start, for those who stream in an event loop alone

    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mirrorsd-stream")
    try:
        iterator, cancel = await loop.run_in_executor(thread, begin)
        try:
            while True:
                found = await loop.run_in_executor(thread, _next, iterator)
                if not found:
                    return
                yield found[0]
        finally:
            cancel()
            thread.submit(_close, iterator)
    finally:
        thread.shutdown(wait=False)


def _next(iterator: Iterator[Item]) -> tuple[Item, ...]:
    for item in iterator:
        return (item,)
    return ()


def _close(iterator: Iterator[Item]) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
