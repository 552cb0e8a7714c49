"""What a frozen program that imports mirrorsd takes along: its data files, and the libraries of both runtimes.

OpenVINO loads its plugins by name, the package loads its public names on first use: no import shows either.
"""

from importlib.metadata import PackageNotFoundError

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules, copy_metadata

_LIBRARIES = ["*.dll", "*.dylib", "lib*.so*"]
_VERSIONS = (
    *("mirrorsd", "openvino", "tokenizers", "numpy", "llguidance"),
    *("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-webgpu"),
)
"""Packages whose versions are read: what is kept on a machine belongs to them."""
_ROOMS = ("graphs", "device_maps", "hub", "texts", "devices", "runtime", "machine")
"""What may be loaded by name only when a bundle is."""

datas = collect_data_files(
    "mirrorsd",
    includes=[
        "device_maps/*.toml",
        "export/*.toml",
        "export/verify/*.txt",
        "server/page/**/*",
        "py.typed",
        "commit.txt",
    ],
)
for name in _VERSIONS:
    try:
        datas += copy_metadata(name)
    except PackageNotFoundError:
        continue
binaries = [
    found
    for package in ("openvino", "onnxruntime")
    for found in collect_dynamic_libs(package, search_patterns=_LIBRARIES)
]
hiddenimports = collect_submodules("mirrorsd", filter=lambda name: name.partition(".")[2].split(".")[0] in _ROOMS)
