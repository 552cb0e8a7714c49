"""What somebody who means ill may try: each is a test, and none of them succeeds.

Everything goes through raw sockets, since well-behaved clients would mend what is wrong. After each attack a request is
answered as ever.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mirrorsd.server import Running
from mirrorsd.tests.end_to_end.server.serving_here import chat, get, post, raw, status_of

pytestmark = pytest.mark.usefixtures("as_well_as_before")


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}/x", "file:///etc/passwd", "http://169.254.169.254/"])
def test_no_address_is_ever_opened(serving: Running, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.3)
        url = address.format(port=trap.getsockname()[1])
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = chat(serving, {"messages": [{"role": "user", "content": [part]}]})
        assert status_of(answer) == 400
        assert b"no URL is ever opened" in answer
        given = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}], "model": "tiny"}
        assert status_of(raw(serving, post(serving, "/v1/responses", json.dumps(given).encode()))) == 400
        with pytest.raises(TimeoutError):
            trap.accept()


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/page/../app.py",
            "/page/..%2fapp.py",
            "/page/%2e%2e/app.py",
            "/page/%252e%252e%252fapp.py",
            "/page/..\\app.py",
        ),
        *("/page//etc/passwd", "/page/%00", "/page/index.html%00.js", "/page/....//app.py", "/../../etc/passwd"),
        *("/page/%5c..%5capp.py", "/page/C:/Windows/win.ini", "/page/", "/page", "/v1/models/../../etc/passwd"),
    ],
)
def test_no_path_leaves_the_pages_folder(serving: Running, path: str) -> None:
    answer = get(serving, path)
    assert status_of(answer) in (400, 404)
    assert b"import " not in answer
    assert b"root:" not in answer


def test_links_in_the_pages_folder_lead_nowhere(tmp_path: Path) -> None:
    from mirrorsd.server.transport.page_files import PageFiles

    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "link.txt").symlink_to(secret)
    (folder / "app.js").write_text("1")
    assert set(PageFiles(folder)._files) == {"app.js"}


def test_templates_of_a_bundle_cannot_reach_python_or_run_for_ever(tmp_path: Path, serving: Running) -> None:
    from mirrorsd.graphs.errors import GenerationError
    from mirrorsd.texts.tokenizer import BundleTokenizer

    source = serving.service.shelf.loaded["tiny"].folder / "tokenizer"
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    for text in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
    ):
        (folder / "chat_template.jinja").write_text(text)
        with pytest.raises(GenerationError, match="refused"):
            BundleTokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])


def test_a_template_that_runs_for_ever_is_broken_off(serving: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = serving.service.shelf.loaded["tiny"].tokenizer
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with monkeypatch.context() as patched:
        template = tokenizer._template
        for name, compiled in template._compiled.items():
            patched.setitem(template._compiled, name, compiled.environment.from_string(loops))
        started = time.monotonic()
        assert status_of(chat(serving)) == 400
        assert time.monotonic() - started < 8


def test_whatever_is_told_by_others_is_a_line_of_the_log_too() -> None:
    """A joint pass that fails is a warning of the runtime; a load that fails when its client has left is asyncio's."""
    code = (
        "import asyncio, logging, warnings; from mirrorsd.server import log_to_stderr; log_to_stderr(is_quiet=True)\n"
        "async def fail(): raise RuntimeError('none waits')\n"
        "async def load(): asyncio.create_task(fail()); await asyncio.sleep(0.01)\n"
        "asyncio.run(load()); logging.getLogger('mirrorsd').warning('tuned elsewhere')\n"
        "warnings.warn('seats take turns', RuntimeWarning); logging.getLogger('mirrorsd.server').warning('once')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in found.stderr.splitlines()]
    for words in ("none waits", "tuned elsewhere", "seats take turns", "once"):
        assert sum(words in f"{line['message']} {line.get('error')}" for line in lines) == 1


def test_no_line_of_the_log_can_be_forged_and_none_has_the_prompt(
    serving: Running, caplog: pytest.LogCaptureFixture
) -> None:
    from mirrorsd.server.transport.log import JsonLines

    with caplog.at_level(logging.DEBUG):
        chat(serving, {"messages": [{"role": "user", "content": "the-secret-prompt"}], "model": "x\r\n{\x1b[31m"})
        chat(
            serving,
            {"messages": [{"role": "user", "content": "the-secret-prompt"}], "temperature": "the-secret-prompt"},
        )
        chat(serving, {"messages": [{"role": "user", "content": "the-secret-prompt"}]}, User_Agent="a\x1b[31mb")
        get(serving, "/a%0d%0aforged%1b[31m")
    lines = [JsonLines().format(record) for record in caplog.records if record.name.startswith(("mirrorsd", "uvicorn"))]
    assert lines
    assert not [line for line in lines if "secret" in line or "\n" in line or "\x1b" in line]
    assert all(json.loads(line)["time"] for line in lines)


def test_seats_and_metrics_show_no_text(serving: Running) -> None:
    chat(serving, {"messages": [{"role": "user", "content": "the-secret-prompt"}]})
    for path in ("/slots", "/metrics", "/props"):
        assert b"secret" not in get(serving, path)


def test_memory_stays_flat_under_refused_requests(serving: Running) -> None:
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page

    big = b'{"messages": [' + b'{"role": "user", "content": "' + b"x" * 900_000 + b'"}]}'
    for _ in range(5):
        chat(serving, big)
    before = resident()
    for _ in range(100):
        assert status_of(chat(serving, big)) == 400
    assert resident() - before < 48 << 20
