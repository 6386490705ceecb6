"""Conversations as training samples: formats, templates and masks, packing."""
