"""Memory of the host that a session asks for: none of it is taken before it is written."""

from pathlib import Path

import numpy as np
import pytest

from mirrorsd.devices.onnxruntime.stage import Place

_STATM = Path("/proc/self/statm")
SHAPE, COUNT = (1, 4, 4096, 128), 16
"""Of 8 MiB each, what the C library would keep when it is freed, and clear when it is asked for again."""


def resident() -> int:
    return int(_STATM.read_text(encoding="utf-8").split()[1]) * 4096


@pytest.mark.skipif(not _STATM.is_file(), reason="Linux says how much memory a process has taken")
def test_a_cache_takes_memory_as_it_is_filled_also_where_another_one_was_before() -> None:
    np.ones(SHAPE, np.float32)  # freed, and from now on the library keeps what is so large
    used = [np.zeros(SHAPE, np.float32) for _ in range(COUNT)]
    behind = np.ones(100_000, np.uint8)
    del used
    before = resident()
    caches = [Place().tensor(SHAPE, "float32") for _ in range(COUNT)]
    assert resident() - before < 8 << 20, "16 of 8 MiB"
    assert not any(cache.read().any() for cache in caches[:2])
    caches[0].write(behind[:1].astype(np.float32))
    assert caches[0].value.numpy().all()
