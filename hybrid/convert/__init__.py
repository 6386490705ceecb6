"""Hugging Face checkpoints to and from the sharded layout: slicing only, but for merging adapters; in little memory."""
