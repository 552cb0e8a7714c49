"""OpenVINO's own NPU compiler as a command, so that its words can be read: `MODEL.xml BLOB PLATFORM KEY=VALUE...`."""

import sys
from pathlib import Path

import openvino as ov

from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS


def main(model: str, blob: str, platform: str, *properties: str) -> int:
    """Compile `model` for `platform` into `blob`; what speaks against it is printed as the compiler's errors are."""
    print(f"OpenVINO {ov.get_version()}", flush=True)
    options = {"NPU_PLATFORM": platform, "NPU_COMPILER_TYPE": "PLUGIN", "LOG_LEVEL": "LOG_INFO"}
    options |= dict(word.split("=", 1) for word in properties)
    try:
        compiled = new_core().compile_model(model, "NPU", options)
        Path(blob).write_bytes(compiled.export_model())
    except OPENVINO_ERRORS as error:
        print(f"[ERROR] {' '.join(str(error).split())}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
