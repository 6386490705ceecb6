"""Megatron-style tensor and sequence parallel LLaMA training under DeepSpeed's pipeline engine."""

__version__ = "0.1.0"
