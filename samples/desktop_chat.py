"""A chat in a window of Tk: answers stream, Stop ends them, colours show where each word came from.

    python samples/desktop_chat.py smollm2.mirror ["a first question"]

It imports nothing but mirrorsd and the standard library. The model works in threads; closing the window stops it.
"""

import queue
import sys
import threading
import tkinter as tk
from tkinter import ttk

from mirrorsd import Cancelled, CancelToken, MirrorError, MirrorPipeline

COLOURS = {"you": "#1a4fa3", "window": "#0b6e4f", "lookup": "#7a4ea3", "correction": "#b3541e", "plain": "#222222"}


class Window:
    """One conversation with one bundle."""

    def __init__(self, root: tk.Tk, bundle: str, question: str = "") -> None:
        self.root, self.events = root, queue.SimpleQueue()
        self.messages, self.cancel, self.is_ready = [], CancelToken(), False
        root.protocol("WM_DELETE_WINDOW", lambda: (self.cancel.cancel(), root.destroy()))
        self.status = ttk.Label(root, text="loading ...", wraplength=700)
        self.status.pack(side="bottom", fill="x", padx=8, pady=8)
        bar = ttk.Frame(root)
        bar.pack(side="bottom", fill="x", padx=8)
        self.text = tk.Text(root, wrap="word", width=72, height=24, font=("TkDefaultFont", 12), state="disabled")
        self.text.pack(fill="both", expand=True, padx=8, pady=8)
        self.entry = ttk.Entry(bar)
        self.entry.pack(side="left", fill="x", expand=True)
        self.entry.bind("<Return>", lambda _: self.ask(self.entry.get().strip()))
        self.stop = ttk.Button(bar, text="Stop", command=lambda: self.cancel.cancel(), state="disabled")
        self.stop.pack(side="left", padx=(8, 0))
        for source, colour in COLOURS.items():
            self.text.tag_configure(source, foreground=colour)
        threading.Thread(target=self.load, args=(bundle, question), daemon=True).start()
        self.poll()

    def load(self, bundle: str, question: str) -> None:
        """In a thread: load the bundle."""
        try:
            self.pipe = MirrorPipeline.load(bundle)
            self.events.put(("ready", f"{self.pipe.device_map.name}: ask something"))
            self.events.put(("ask", question))
        except MirrorError as error:
            self.events.put(("failed", str(error)))

    def ask(self, question: str) -> None:
        """Ask, once the model is there and has answered the last question."""
        if not question or not self.is_ready:
            return
        self.is_ready, self.cancel = False, CancelToken()
        self.stop["state"], self.status["text"] = "normal", "green: drafted, violet: looked up, brown: corrected"
        self.entry.delete(0, "end")
        self.show(f"\n{question}\n", "you")
        self.messages.append({"role": "user", "content": question})
        threading.Thread(target=self.answer, args=(self.cancel,), daemon=True).start()

    def answer(self, cancel: CancelToken) -> None:
        """In a thread: stream the answer; every token says where it came from."""
        said, defaults = "", self.pipe.manifest.chat_defaults.generation
        try:
            for chunk in self.pipe.stream(messages=self.messages, max_new_tokens=400, cancel=cancel, **defaults):
                said += chunk.text
                for token in chunk.tokens:
                    self.events.put((token.source, token.text))
                ended = str(chunk.result.stats) if chunk.result is not None else ""
        except (Cancelled, MirrorError) as error:
            ended = "stopped" if isinstance(error, Cancelled) else str(error)
        self.messages.append({"role": "assistant", "content": said})
        self.events.put(("ready", ended))

    def poll(self) -> None:
        """Show what the threads have said since."""
        while not self.events.empty():
            kind, text = self.events.get()
            if kind in COLOURS:
                self.show(text, kind)
            elif kind == "ask":
                self.ask(text)
            else:
                self.stop["state"], self.status["text"], self.is_ready = "disabled", text, kind == "ready"
        self.root.after(30, self.poll)

    def show(self, text: str, tag: str) -> None:
        """Add text at the end."""
        self.text["state"] = "normal"
        self.text.insert("end", text, tag)
        self.text["state"] = "disabled"
        self.text.see("end")


if __name__ == "__main__":
    window = tk.Tk(className="mirrorsd")
    Window(window, *sys.argv[1:3])
    window.mainloop()
