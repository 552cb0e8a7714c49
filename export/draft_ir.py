"""The draft's graph as one OpenVINO IR with symbolic rows, tips and capacity.

Owns: ONNX -> IR, weight precision, and the names of the IR's ports. Does not own: compiling for a device.
"""

import contextlib
import importlib
import importlib.util
import io
import logging
from pathlib import Path

import onnx_ir as ir
import openvino as ov

from mirrorsd.graphs.contract import StageContract
from mirrorsd.graphs.errors import ConfigError


def write_draft(model: ir.Model, contract: StageContract, xml_path: Path, precision: str) -> None:
    """Convert the exported draft to `xml_path` and the `.bin` beside it.

    Args:
        model: The draft as ONNX.
        contract: Its contract; the ports get exactly its names.
        xml_path: Where to write; the folder exists.
        precision: "fp32", "fp16" or "int8" (weights, one scale per output row).

    Raises:
        ConfigError: "int8" without nncf.
    """
    onnx_path = xml_path.with_suffix(".onnx")
    ir.save(model, onnx_path, external_data=f"{onnx_path.name}.data")
    try:
        converted = ov.convert_model(onnx_path)
        for port, spec in zip(
            (*converted.inputs, *converted.outputs), (*contract.inputs, *contract.outputs), strict=True
        ):
            port.get_tensor().set_names({spec.name})
        if precision == "int8":
            converted = _compress_weights(converted)
        ov.save_model(converted, xml_path, compress_to_fp16=precision == "fp16")
    finally:
        onnx_path.unlink(missing_ok=True)
        onnx_path.with_name(f"{onnx_path.name}.data").unlink(missing_ok=True)


def _compress_weights(model: ov.Model) -> ov.Model:
    """Write weights as int8 with one scale per output row; nncf's table and bar are kept off the terminal.

    Raises:
        ConfigError: nncf is not installed.
    """
    if importlib.util.find_spec("nncf") is None:
        raise ConfigError("an int8 draft needs nncf: pip install nncf, or choose fp16")
    nncf = importlib.import_module("nncf")
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    finally:
        logger.setLevel(level)
