"""The providers of ONNX Runtime that a target can run on, and what is particular to each.

Owns: the list. Does not own: options that a provider alone has (`devices/onnxruntime/providers.py`), cards.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What sets a provider apart.

    Attributes:
        package: How ONNX Runtime is installed with it.
        memory: ONNX Runtime's word for where its tensors live; "cpu" is the host.
        has_numbers: Whether its devices have numbers; one that has none uses the device that the system prefers.
        has_copies: Whether the host can copy its tensors; else small graphs on the device do that.
        is_on_cuda: Whether streams and captured graphs are CUDA's.
        unreachable: What is said where its device gives no memory, `{device_id}` its number; "" where nobody looks.
    """

    package: str
    memory: str = "cpu"
    has_numbers: bool = True
    has_copies: bool = True
    is_on_cuda: bool = False
    unreachable: str = ""


PROVIDERS = {
    "CPUExecutionProvider": Provider(package='pip install "mirrorsd[cpu]"'),
    "CUDAExecutionProvider": Provider(
        package='pip uninstall onnxruntime && pip install "mirrorsd[cuda]"',
        memory="cuda",
        is_on_cuda=True,
        unreachable="NVIDIA GPU {device_id}; it gives no memory (check `nvidia-smi`, the driver, and the libraries of "
        "CUDA and cuDNN)",
    ),
    "NvTensorRTRTXExecutionProvider": Provider(
        package="pip uninstall onnxruntime && pip install onnxruntime-trt-rtx", memory="cuda", is_on_cuda=True
    ),
    "DmlExecutionProvider": Provider(
        package='Windows: pip uninstall onnxruntime && pip install "mirrorsd[directml]"', memory="dml"
    ),
    "WebGpuExecutionProvider": Provider(
        package='pip uninstall onnxruntime && pip install "mirrorsd[webgpu]"',
        memory="webgpu",
        has_numbers=False,
        has_copies=False,
        unreachable="a GPU that WebGPU reaches; none gives memory (check the graphics driver, on Linux `vulkaninfo "
        "--summary`)",
    ),
}
ON_CUDA = tuple(name for name, provider in PROVIDERS.items() if provider.is_on_cuda)
