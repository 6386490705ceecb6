"""The LLaMA decoder, layer by layer, on a bare tensor-parallel group."""
