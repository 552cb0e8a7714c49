"""Make the pictures of the pages anew: the page in a browser, the desktop sample in its window, a terminal.

    python bench/pictures.py smollm2.mirror                   # all, into docs/images
    python bench/pictures.py smollm2.mirror --only desktop    # or: page, terminal

Everything on them is what the programs show: a server, a browser and a terminal are started, asked and looked at. The
page needs Chromium and playwright; the others need Xvfb, the terminal xterm and tmux, too (Debian: `apt-get install
chromium xvfb xterm tmux`). Exit status 1 where a picture is larger than a page should load.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
XVFB = shutil.which("Xvfb")
MOST_BYTES = 150_000
_STILL_S, _LOOK_S, _LONGEST_S = 4.0, 0.5, 180.0
"""A window that does not change for so long has shown all; how often one looks, and for how long at most."""
_WINDOW = """
import runpy, sys, tkinter as tk
root = tk.Tk(className="mirrorsd")
window = runpy.run_path(sys.argv[1])["Window"](root, *sys.argv[2:])
def look():
    if window.is_ready and window.messages:
        print("answered", flush=True)
    else:
        root.after(50, look)
look()
root.mainloop()
"""
"""The sample's window, which says when it has answered its first question."""
WIDTHS = {"light": (1280, 800), "dark": (1280, 800), "phone": (390, 800)}
EDIT = (
    "Rename the function mean to average. Write the whole code again:\n\n```python\ndef mean(values):\n    total = 0\n"
    "    for value in values:\n        total = total + value\n    return total / len(values)\n```"
)
CHAT = "What do bees make?"
SKY = "Explain in a few sentences why the sky is blue."
_SHOWN = {"light": (EDIT, "mirror"), "dark": (SKY, "serial"), "phone": (CHAT, "mirror")}
_SETTINGS = {"seed": 7, "max_tokens": 140}
_MOMENT = 300
"""Where the slider of what the devices did stands, of 1,000."""
_LOOKS = ["-bg", "#fbfbf8", "-fg", "#1c2321", "-fa", "Monospace", "-fs", "11", "-geometry", "84x24", "-b", "12"]


def main() -> int:
    """Make what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    makers = {"page": make_page, "desktop": make_desktop, "terminal": make_terminal}
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--only", choices=makers)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    is_fine = True
    for name, make in makers.items():
        if options.only not in (None, name):
            continue
        for path in make(options.bundle.absolute(), options.folder):
            size = path.stat().st_size
            print(f"{path}  {size:,} bytes{'' if size <= MOST_BYTES else ', too large'}", flush=True)
            is_fine &= size <= MOST_BYTES
    return int(not is_fine)


def make_page(bundle: Path, folder: Path) -> Iterator[Path]:
    """The page: light with code, dark with a comparison, and on a phone."""
    from playwright.sync_api import sync_playwright

    from mirrorsd.server import ServerSettings
    from mirrorsd.server.running import Running

    program = shutil.which("chromium") or shutil.which("google-chrome")
    name = bundle.stem
    with Running({name: bundle}, ServerSettings(port=0)) as running, sync_playwright() as tool:
        browser: Any = tool.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for look, size in WIDTHS.items():
            shape = dict(zip(("width", "height"), size, strict=True))
            theme = "dark" if look == "dark" else "light"
            page = browser.new_context(viewport=shape, color_scheme=theme).new_page()
            page.goto(running.url)
            page.wait_for_selector("#model option", state="attached")
            _ask(page, *_SHOWN[look])
            if look == "dark":
                page.click("text=Compare with plain")
                page.wait_for_selector(".comparison.same", timeout=60_000)
            if look != "phone":
                page.locator("#moment").fill(str(_MOMENT))
            page.evaluate("document.fonts.ready.then(() => document.activeElement.blur())")
            yield _saved(page.screenshot(), folder / f"chat_{look}.png")
            page.context.close()
        browser.close()


def _ask(page: Any, question: str, method: str) -> None:
    """Ask in the page and wait for the whole answer."""
    page.click("#open-settings")
    page.select_option("#settings [name=method]", method)
    for name, value in _SETTINGS.items():
        page.fill(f"#settings [name={name}]", str(value))
    page.click("#settings button[type=submit]")
    page.fill("#question", question)
    page.keyboard.press("Enter")
    page.wait_for_selector("body.is-answering")
    page.wait_for_selector("body:not(.is-answering) #send:visible", timeout=60_000)


def make_desktop(bundle: Path, folder: Path) -> Iterator[Path]:
    """The sample's window with an answer."""
    with display(900, 680) as shown_on:
        command = [sys.executable, "-c", _WINDOW, str(ROOT / "samples" / "desktop_chat.py"), str(bundle), CHAT]
        with _running(command, {"DISPLAY": shown_on}) as window:
            window.stdout.readline()
            yield _saved(_when_still(shown_on), folder / "desktop.png")


def make_terminal(bundle: Path, folder: Path) -> Iterator[Path]:
    """A terminal with a conversation in it."""
    with display(900, 560) as shown_on, TemporaryDirectory() as place:
        tmux = ["tmux", "-S", f"{place}/tmux", "-f", "/dev/null"]
        mirrorsd = Path(sys.executable).with_name("mirrorsd")
        chat = f"cd '{bundle.parent}' && exec '{mirrorsd}' chat {bundle.name} --seed 7 --max-new-tokens 160"
        session = [*tmux, "new-session", chat, ";", "set", "-g", "status", "off"]
        shell = {"DISPLAY": shown_on, "XDG_CONFIG_HOME": place, "COLORTERM": "truecolor"}
        with _running(["xterm", *_LOOKS, "-e", *session], shell):
            look = [*tmux, "capture-pane", "-p"]
            _wait_for("Ctrl-D ends.", look)
            subprocess.run([*tmux, "send-keys", SKY, "Enter"], check=True)
            _wait_for("tokens/s", look)
            picture = _when_still(shown_on)
            subprocess.run([*tmux, "kill-server"], check=True)
        yield _saved(picture, folder / "terminal.png")


def _wait_for(words: str, look: list[str]) -> None:
    """Wait until a command prints these words.

    Raises:
        TimeoutError: it does not for minutes.
    """
    until = time.monotonic() + _LONGEST_S
    while words not in subprocess.run(look, capture_output=True, text=True, check=False).stdout:
        if time.monotonic() > until:
            raise TimeoutError(f"{words!r} was not said within {_LONGEST_S:.0f} s")
        time.sleep(_LOOK_S)


@contextmanager
def display(width: int, height: int) -> Iterator[str]:
    """A screen of its own, without a monitor: its name, as `DISPLAY` wants it."""
    ours, its = os.pipe()
    screen = ["-screen", "0", f"{width}x{height}x24", "-nolisten", "tcp"]
    command = [XVFB or "Xvfb", "-displayfd", str(its), *screen]
    server = subprocess.Popen(command, pass_fds=(its,), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(its)
    try:
        with os.fdopen(ours) as said:
            name = said.readline().strip()
        if not name:
            raise RuntimeError(f"Xvfb gave no display; it ended with {server.wait()}")
        yield f":{name}"
    finally:
        server.terminate()
        server.wait()


@contextmanager
def _running(command: list[str], variables: dict[str, str]) -> Iterator[Any]:
    """A program that is ended in the end."""
    program = subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
    try:
        yield program
    finally:
        program.terminate()
        program.wait()


def _when_still(shown_on: str) -> Any:
    """What a display shows once something stands on it that does not change any more.

    Raises:
        TimeoutError: it changes for minutes.
    """
    from PIL import ImageGrab

    seen, since = b"", time.monotonic()
    while time.monotonic() - since < _LONGEST_S:
        picture = ImageGrab.grab(xdisplay=shown_on)
        if picture.getbbox() is None or picture.tobytes() != seen:
            seen, still_since = picture.tobytes(), time.monotonic()
        elif time.monotonic() - still_since > _STILL_S:
            return picture.crop(picture.getbbox())
        time.sleep(_LOOK_S)
    raise TimeoutError(f"{shown_on} was not still for {_STILL_S:.0f} s within {_LONGEST_S:.0f} s")


def _saved(picture: Any, path: Path) -> Path:
    """Write a picture; one that would be too large in fewer colours."""
    import io

    from PIL import Image

    whole = (Image.open(io.BytesIO(picture)) if isinstance(picture, bytes) else picture).convert("RGB")
    whole.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        whole.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
