"""What is trained: streaming drafts, their attention, whole models in memory."""
