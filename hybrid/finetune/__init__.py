"""Fine-tuning: the same trainer, other data."""
