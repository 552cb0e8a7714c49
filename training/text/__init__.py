"""Text to learn from: corpora, documents, what the target writes itself."""

TEXT_FOLDER, HELD_BACK_FOLDER = "text", "text_held_back"
"""What the target wrote, in a training's work folder: to learn from, and to measure on."""
