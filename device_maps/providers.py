"""The providers of ONNX Runtime that a target can run on, and what is particular to each.

Owns: the list. Does not own: options that a provider alone has (`devices/onnxruntime/providers.py`), cards.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What sets a provider apart.

    Attributes:
        package: What pip installs ONNX Runtime with it from.
        memory: ONNX Runtime's word for where its tensors live; "cpu" is the host.
        has_numbers: Whether its devices have numbers; one that has none uses the device that the system prefers.
        has_copies: Whether the host can copy its tensors; else small graphs on the device do that.
        is_on_cuda: Whether streams and captured graphs are CUDA's.
        system: The only system that has it; "" where it is for several.
        unreachable: What is said where its device gives no memory, `{device_id}` its number; "" where nobody looks.
    """

    package: str
    memory: str = "cpu"
    has_numbers: bool = True
    has_copies: bool = True
    is_on_cuda: bool = False
    system: str = ""
    unreachable: str = ""


PROVIDERS = {
    "CPUExecutionProvider": Provider(package='"mirrorsd[cpu]"', has_numbers=False),
    "CUDAExecutionProvider": Provider(
        package='"mirrorsd[cuda]"',
        memory="cuda",
        is_on_cuda=True,
        unreachable="NVIDIA GPU {device_id}; it gives no memory (check `nvidia-smi`, the driver, and the libraries of "
        "CUDA and cuDNN)",
    ),
    "NvTensorRTRTXExecutionProvider": Provider(package="onnxruntime-trt-rtx", memory="cuda", is_on_cuda=True),
    "DmlExecutionProvider": Provider(package='"mirrorsd[directml]"', memory="dml", system="Windows"),
    "WebGpuExecutionProvider": Provider(
        package='"mirrorsd[webgpu]"',
        memory="webgpu",
        has_numbers=False,
        has_copies=False,
        unreachable="a GPU that WebGPU reaches; none gives memory (check the graphics driver, on Linux `vulkaninfo "
        "--summary`)",
    ),
}
ON_CUDA = tuple(name for name, provider in PROVIDERS.items() if provider.is_on_cuda)
