"""Attention of onnxruntime over torch tensors."""
