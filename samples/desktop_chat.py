"""A chat in a window of Tk: answers stream, Stop ends them, colours show where each word came from.

    python samples/desktop_chat.py smollm2.mirror

It imports nothing but mirrorsd and the standard library. The model works in a thread of its own.
"""

import queue
import sys
import threading
import tkinter as tk
from tkinter import ttk

from mirrorsd import Cancelled, CancelToken, MirrorError, MirrorPipeline

COLOURS = {"window": "#0b6e4f", "lookup": "#7a4ea3", "correction": "#b3541e", "plain": "#222222"}
WORDS = {"window": "drafted", "lookup": "looked up", "correction": "corrected", "plain": "plain"}


class Window:
    """One conversation with one bundle."""

    def __init__(self, root: tk.Tk, bundle: str) -> None:
        self.root, self.events = root, queue.SimpleQueue()
        self.messages, self.cancel = [], CancelToken()
        root.title("mirrorsd")
        self.status = ttk.Label(root, text="loading ...", wraplength=700)
        self.status.pack(side="bottom", fill="x", padx=8, pady=8)
        bar = ttk.Frame(root)
        bar.pack(side="bottom", fill="x", padx=8)
        self.text = tk.Text(root, wrap="word", width=72, height=24, font=("TkDefaultFont", 12), state="disabled")
        self.text.pack(fill="both", expand=True, padx=8, pady=8)
        self.entry = ttk.Entry(bar)
        self.entry.pack(side="left", fill="x", expand=True)
        self.entry.bind("<Return>", lambda _: self.ask())
        self.stop = ttk.Button(bar, text="Stop", command=lambda: self.cancel.cancel(), state="disabled")
        self.stop.pack(side="left", padx=(8, 0))
        for source, colour in COLOURS.items():
            self.text.tag_configure(source, foreground=colour)
        self.text.tag_configure("you", font=("TkDefaultFont", 12, "bold"))
        threading.Thread(target=self.load, args=(bundle,), daemon=True).start()
        self.poll()

    def load(self, bundle: str) -> None:
        """In a thread: load the bundle."""
        try:
            self.pipe = MirrorPipeline.load(bundle)
            self.events.put(("ready", f"{self.pipe.device_map.name}: ask something"))
        except MirrorError as error:
            self.events.put(("ready", str(error)))

    def ask(self) -> None:
        """Send what was typed."""
        question = self.entry.get().strip()
        if not question or not hasattr(self, "pipe") or str(self.stop["state"]) == "normal":
            return
        self.entry.delete(0, "end")
        self.show(f"\n{question}\n", "you")
        self.messages.append({"role": "user", "content": question})
        self.cancel, self.stop["state"] = CancelToken(), "normal"
        threading.Thread(target=self.answer, args=(self.cancel,), daemon=True).start()

    def answer(self, cancel: CancelToken) -> None:
        """In a thread: stream the answer; every piece says where its first token came from."""
        said = ""
        defaults = self.pipe.manifest.chat_defaults.generation
        try:
            for chunk in self.pipe.stream(messages=self.messages, max_new_tokens=400, cancel=cancel, **defaults):
                said += chunk.text
                self.events.put((chunk.tokens[0].source if chunk.tokens else "plain", chunk.text))
                if chunk.result is not None:
                    self.events.put(("done", str(chunk.result.stats)))
        except (Cancelled, MirrorError) as error:
            self.events.put(("done", "stopped" if isinstance(error, Cancelled) else str(error)))
        self.messages.append({"role": "assistant", "content": said})

    def poll(self) -> None:
        """Show what the threads have said since."""
        while not self.events.empty():
            kind, text = self.events.get()
            if kind in ("ready", "done"):
                self.stop["state"], self.status["text"] = "disabled", text
            else:
                self.status["text"] = f"now: {WORDS[kind]}   (green drafted, violet looked up, brown corrected)"
                self.show(text, kind)
        self.root.after(30, self.poll)

    def show(self, text: str, tag: str) -> None:
        """Add text at the end."""
        self.text["state"] = "normal"
        self.text.insert("end", text, tag)
        self.text["state"] = "disabled"
        self.text.see("end")


if __name__ == "__main__":
    window = tk.Tk()
    Window(window, sys.argv[1])
    window.mainloop()
