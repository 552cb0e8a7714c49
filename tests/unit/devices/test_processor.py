"""What a processor is called, by what its system says."""

import platform
from pathlib import Path

import pytest

from mirrorsd.cli.output.machine import describe_machine
from mirrorsd.devices.layouts import processor_name

X86 = (
    "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu\n\nprocessor\t: 1\nmodel name\t: other\n"
)
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd40\nCPU revision\t: 1\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"), [(X86, "Intel(R) Xeon(R) Processor"), (ARM, "0x41 0xd40 0x3 1"), ("processor\t: 0\n", "")]
)
def test_the_first_processor_is_named(tmp_path: Path, cpuinfo: str, name: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo, encoding="utf-8")
    assert processor_name(path) == (name or platform.processor() or platform.machine())


def test_reports_name_the_same_processor() -> None:
    assert describe_machine()["processor"] == processor_name() != ""
