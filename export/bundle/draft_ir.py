"""The draft's graph as one OpenVINO IR with symbolic rows, tips and capacity.

Owns: ONNX -> IR, and the names of the IR's ports. Does not own: fewer bits (`draft_compression.py`), compiling.
"""

from pathlib import Path

import onnx_ir as ir
import openvino as ov

from mirrorsd.graphs.contract import StageContract


def write_draft(model: ir.Model, contract: StageContract, xml_path: Path, precision: str) -> None:
    """Convert the exported draft to `xml_path` and the `.bin` beside it.

    Args:
        model: The draft as ONNX.
        contract: Its contract; the ports get exactly its names.
        xml_path: Where to write; the folder exists.
        precision: "fp32" or "fp16"; fewer bits are `draft_compression.py`'s.
    """
    onnx_path = xml_path.with_suffix(".onnx")
    ir.save(model, onnx_path, external_data=f"{onnx_path.name}.data")
    try:
        converted = ov.convert_model(onnx_path)
        for port, spec in zip(
            (*converted.inputs, *converted.outputs), (*contract.inputs, *contract.outputs), strict=True
        ):
            port.get_tensor().set_names({spec.name})
        ov.save_model(converted, xml_path, compress_to_fp16=precision == "fp16")
    finally:
        onnx_path.unlink(missing_ok=True)
        onnx_path.with_name(f"{onnx_path.name}.data").unlink(missing_ok=True)
