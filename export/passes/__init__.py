"""From a PyTorch module to an ONNX graph, and edits of that graph."""
