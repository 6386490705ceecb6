"""Running a trained model forward: loss on data, and text."""
