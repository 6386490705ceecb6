"""The distributed optimizer and the engine that drives it."""
