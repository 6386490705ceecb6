"""The sum that merges an adapter: the same bits in whatever part it is computed."""

from __future__ import annotations

import torch

from hybrid.tensor_parallel.lora import low_rank_product


def test_every_slice_has_the_bits_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    b, a = torch.randn(70, 9, generator=generator), torch.randn(9, 130, generator=generator)
    whole = low_rank_product(b, a, 0.3)
    for rows in (slice(0, 1), slice(3, 8), slice(0, 35)):
        for columns in (slice(0, 1), slice(7, 13), slice(65, 130)):
            assert torch.equal(low_rank_product(b[rows], a[:, columns], 0.3), whole[rows, columns])
    # fp32 sums of nine products of order 1
    torch.testing.assert_close(whole.double(), 0.3 * (b.double() @ a.double()), rtol=0, atol=1e-5)
