"""How many tokens' logits the fused loss holds at a time: arithmetic only, for the loss and for whoever plans it."""

from __future__ import annotations

CHUNK_FRACTION = 16
SMALL_CHUNK_BYTES = 8 << 20
LARGE_CHUNK_BYTES = 256 << 20


def keeps_logits(num_tokens: int, hidden_size: int) -> bool:
    """Whether all tokens' fp32 logits [T, V] are held, of a head that is trained: where its gradient [V, h], which
    chunks would add up in fp32, is no smaller."""
    return num_tokens <= hidden_size


def default_chunk_tokens(num_tokens: int, columns: int) -> int:
    """Tokens whose fp32 logits are held at a time: a sixteenth of all, half of all within 8 MiB, at most 256 MiB.

    Each chunk reads the whole weight and rewrites its gradient, so chunks are as large as memory allows. On a CPU 32
    tokens at a time took 1.5 times as long as 256, and 64 took 1.25 times; where the logits are small anyway, that is
    not worth it. At 256 MiB there are 512 tokens of a vocabulary of 128k, enough for full GEMMs.
    """
    row_bytes = 4 * columns
    tokens = max(-(-num_tokens // CHUNK_FRACTION), min(-(-num_tokens // 2), SMALL_CHUNK_BYTES // row_bytes))
    return max(1, min(tokens, LARGE_CHUNK_BYTES // row_bytes))
