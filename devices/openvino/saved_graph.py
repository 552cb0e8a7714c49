"""OpenVINO's graphs as files.

Owns: the words for a disk that takes no more, which OpenVINO does not give. Does not own: what is in the graphs.
"""

import errno
from pathlib import Path

import openvino as ov

_OF_A_STREAM = "iostream"
"""In the words of every C++ library for a file that cannot be written further; which errno it was is lost."""


def save_graph(model: ov.Model, path: Path, *, in_fp16: bool) -> None:
    """Write a graph to `path`, which ends in .xml, and its numbers beside it.

    Raises:
        OSError: the disk has no room (`ENOSPC`); OpenVINO has removed what it had written.
    """
    try:
        ov.save_model(model, path, compress_to_fp16=in_fp16)
    except RuntimeError as error:
        if _OF_A_STREAM not in str(error):
            raise
        raise OSError(errno.ENOSPC, f"OpenVINO cannot write it to its end ({error})", str(path)) from error
