"""What a start loads before it has to: it stands in front of every first token."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["openvino", "onnxruntime", "asyncio", "torch", "jinja2"])
def test_naming_the_pipeline_does_not_load(name: str) -> None:
    """Both runtimes load on their devices' threads, beside each other; event loops and templates where there is one."""
    code = f"import sys; from mirrorsd import MirrorPipeline; assert {name!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_command_reads_the_options_of_no_other() -> None:
    code = (
        "import sys; from mirrorsd.cli.application import application; application('generate'); "
        "read = [name for name in sys.modules if name.startswith('mirrorsd.cli.commands.')]; "
        "assert 'mirrorsd.cli.commands.generate' in read; assert not any('train' in name for name in read), read"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_command_s_imports_are_not_searched_for_garbage_again_and_again() -> None:
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(sum(one['collections'] for one in gc.get_stats()))); "
        "sys.argv = ['mirrorsd', 'generate', '--help']; from mirrorsd.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    assert int(done.stdout.split()[-1]) < 40
