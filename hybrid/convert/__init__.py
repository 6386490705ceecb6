"""Hugging Face checkpoints to and from the sharded layout: slicing only, one process, little memory."""
