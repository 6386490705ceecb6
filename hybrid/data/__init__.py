"""Pretraining data: text to token files, token files to samples, samples to microbatches."""
