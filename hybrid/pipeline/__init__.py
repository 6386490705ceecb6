"""The LLaMA as layers of DeepSpeed's pipeline."""
