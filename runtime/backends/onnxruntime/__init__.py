"""The target on ONNX Runtime."""
