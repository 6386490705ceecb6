"""Hugging Face checkpoints to and from the sharded layout."""
