"""Tensor and sequence parallel layers, as in Megatron-LM, over a bare process group."""
