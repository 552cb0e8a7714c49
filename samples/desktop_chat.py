"""A chat in a window of Tk: answers stream, Stop ends them, colours show where each word came from.

    python samples/desktop_chat.py smollm2.mirror ["a first question"]

It imports nothing but mirrorsd and the standard library. The model works in a thread of its own; closing the window
stops it.
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

    def __init__(self, root: tk.Tk, bundle: str, question: str = "") -> None:
        self.root, self.events = root, queue.SimpleQueue()
        self.messages, self.cancel, self.is_ready = [], CancelToken(), False
        root.title("mirrorsd")
        root.protocol("WM_DELETE_WINDOW", self.close)
        self.status = ttk.Label(root, text="loading ...", wraplength=700)
        self.status.pack(side="bottom", fill="x", padx=8, pady=8)
        bar = ttk.Frame(root)
        bar.pack(side="bottom", fill="x", padx=8)
        self.text = tk.Text(root, wrap="word", width=72, height=24, font=("TkDefaultFont", 12), state="disabled")
        self.text.pack(fill="both", expand=True, padx=8, pady=8)
        self.entry = ttk.Entry(bar)
        self.entry.pack(side="left", fill="x", expand=True)
        self.entry.bind("<Return>", lambda _: self.typed())
        self.stop = ttk.Button(bar, text="Stop", command=lambda: self.cancel.cancel(), state="disabled")
        self.stop.pack(side="left", padx=(8, 0))
        for source, colour in COLOURS.items():
            self.text.tag_configure(source, foreground=colour)
        self.text.tag_configure("you", font=("TkDefaultFont", 12, "bold"))
        threading.Thread(target=self.load, args=(bundle, question), daemon=True).start()
        self.poll()

    def load(self, bundle: str, question: str) -> None:
        """In a thread: load the bundle."""
        try:
            self.pipe = MirrorPipeline.load(bundle)
            self.events.put(("ready", f"{self.pipe.device_map.name}: ask something"))
            self.events.put(("ask", question))
        except MirrorError as error:
            self.events.put(("done", str(error)))

    def typed(self) -> None:
        """Ask what was typed, once the model is there and has answered the last question."""
        if self.is_ready:
            self.ask(self.entry.get().strip())
            self.entry.delete(0, "end")

    def ask(self, question: str) -> None:
        """Ask a question, unless it is empty."""
        if not question:
            return
        self.is_ready = False
        self.show(f"\n{question}\n", "you")
        self.messages.append({"role": "user", "content": question})
        self.cancel, self.stop["state"] = CancelToken(), "normal"
        threading.Thread(target=self.answer, args=(self.cancel,), daemon=True).start()

    def answer(self, cancel: CancelToken) -> None:
        """In a thread: stream the answer; every token says where it came from."""
        said = ended = ""
        defaults = self.pipe.manifest.chat_defaults.generation
        try:
            for chunk in self.pipe.stream(messages=self.messages, max_new_tokens=400, cancel=cancel, **defaults):
                said += chunk.text
                for token in chunk.tokens:
                    self.events.put((token.source, token.text))
                if chunk.result is not None:
                    ended = str(chunk.result.stats)
        except Cancelled:
            ended = "stopped"
        except MirrorError as error:
            ended = str(error)
        self.messages.append({"role": "assistant", "content": said})
        self.events.put(("ready", ended))

    def poll(self) -> None:
        """Show what the threads have said since."""
        while not self.events.empty():
            kind, text = self.events.get()
            if kind in WORDS:
                self.status["text"] = f"now: {WORDS[kind]}   (green drafted, violet looked up, brown corrected)"
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

    def close(self) -> None:
        """Stop the answer, and end the window."""
        self.cancel.cancel()
        self.root.destroy()


if __name__ == "__main__":
    window = tk.Tk()
    Window(window, *sys.argv[1:3])
    window.mainloop()
