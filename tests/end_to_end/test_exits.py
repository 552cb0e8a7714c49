"""Scripts that end without `close`, and forked children: each has its own exit status, and is told what is wrong."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.bench.claims.process.exits import run, scripts

FEW = [
    ("daemon's text", "sys.exit"),
    ("daemon's text", "handler"),
    ("sessions and seats", "forked child"),
]
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
BEGIN = """
import gc, multiprocessing, os, sys, threading
from mirrorsd import MirrorPipeline
from mirrorsd.graphs.errors import GenerationError
def load():
    return MirrorPipeline.load({bundle!r}, device_map="cpu")
def is_told(use):
    try:
        use()
    except GenerationError as error:
        return "forked" in str(error) and "spawn" in str(error)
    return False
def text_of(pipe, **settings):
    return pipe.generate("Every morning the fox", max_new_tokens=20, ignore_eos=True, **settings).token_ids
"""
CHILDREN = {
    "uses everything": """
pipe = load()
session, seats = pipe.session(), pipe.seats(1)
stream = session.stream("The old heron", max_new_tokens=200, ignore_eos=True, method="mirror")
text, _ = text_of(pipe), next(stream)
threading.Thread(target=lambda: [text_of(pipe, method="mirror") for _ in range(5)]).start()  # at work at the fork
if not (child := os.fork()):
    uses = [lambda: text_of(pipe), lambda: next(stream), pipe.session, lambda: pipe.stream("Hi").__next__(),
            lambda: session.save_cache("nowhere"), lambda: text_of(session)]
    told = [is_told(use) for use in uses]
    pipe.cancel(), session.cancel(), session.close(), pipe.close(), stream.close(), seats.close()
    sys.exit(5 if all(told) else repr(told))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert text_of(pipe) == text, "the parent goes on"
""",
    "takes a seat": """
pipe = load()
ids, seats, release = pipe.encode("The old heron " * 20), pipe.seats(2), threading.Event()
def read():
    with seats.take(ids) as session:
        return session.generate(token_ids=ids, max_new_tokens=4)
pipe.engine.target_worker.submit(lambda: release.wait(60))
threading.Thread(target=read).start()
while not any(len(session._seat.target.reading) for session in seats._sessions):
    release.wait(0.01)
if not (child := os.fork()):  # nobody reads on in it
    os._exit(5 if is_told(read) else 6)
release.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
""",
    "drops everything": """
pipe = load()
text_of(pipe, method="mirror")
if not (child := os.fork()):
    del pipe
    gc.collect()
    raise RuntimeError("on purpose")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
""",
    "loads its own": """
pipe = load()
text = text_of(pipe)
if not (child := os.fork()):
    own = load()
    sys.exit(5 if text_of(own) == text else 6)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
""",
    "of a thread": """
pipe = load()
def fork():
    global status
    if not (child := os.fork()):
        os._exit(5 if is_told(lambda: text_of(pipe)) else 6)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread = threading.Thread(target=fork)
thread.start()
thread.join()
assert status == 5, status
""",
    "of multiprocessing": """
pipe = load()
text = text_of(pipe)
def work(queue):
    queue.put(is_told(lambda: text_of(pipe)))
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=work, args=(queue,))
process.start()
assert queue.get(timeout=30)
process.join(30)
assert process.exitcode == 0, process.exitcode
""",
}


@pytest.mark.skipif(sys.platform == "win32", reason="signals and forks of Unix")
def test_scripts_without_close_end_with_their_own_status(tiny_bundle: Path) -> None:
    """A few of the fifty; `bench/claims/process/exits.py` runs all."""
    chosen = [script for script in scripts(tiny_bundle) if (script.state, script.ending) in FEW]
    assert len(chosen) == len(FEW)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, chosen))
    assert found == [script.status for script in chosen]


@forks
@pytest.mark.parametrize("child", CHILDREN)
def test_a_forked_child_is_told_and_ends(tiny_bundle: Path, child: str) -> None:
    program = BEGIN.format(bundle=str(tiny_bundle)) + CHILDREN[child]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_thread_that_outlives_the_main_one_loads_and_decodes(tiny_bundle: Path) -> None:
    """As where a program's last line starts its thread: pools of the standard library take no work from then on."""
    program = (
        BEGIN.format(bundle=str(tiny_bundle))
        + """
def work():
    threading.main_thread().join()
    print(len(text_of(load())))
threading.Thread(target=work).start()
"""
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=90, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("20\n", "")


@pytest.fixture(scope="module")
def pipe(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as loaded:
        yield loaded


def test_a_pipeline_goes_to_no_other_process_by_pickle(pipe: MirrorPipeline) -> None:
    """As `multiprocessing` does it where processes are spawned."""
    for one in (pipe, pipe.session()):
        with pytest.raises(TypeError, match="cannot go to another process: its devices are in this one"):
            pickle.dumps(one)
