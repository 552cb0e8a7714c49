"""Whether products of narrow floats are fast here.

Owns: asking the processor. Does not own: what is multiplied in them (`mirrorsd.training`, `mirrorsd.export`).
"""

from functools import cache

import torch


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has products in bfloat16.

    Others make each out of single ones, which took eight times as long as single precision (two cores with AVX2).
    """
    return any(is_there for name, is_there in torch.cpu.get_capabilities().items() if "bf16" in name)
