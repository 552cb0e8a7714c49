"""What an Intel NPU needs of a draft: its graph, its passes, its compiler, and what that has compiled."""
