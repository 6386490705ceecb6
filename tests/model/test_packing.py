"""Places, positions and attention of packed documents."""

from __future__ import annotations

import pytest
import torch

from hybrid.model import attention
from hybrid.model.attention import causal_attention, document_attention
from hybrid.model.packing import Documents, segment_positions, segment_rope
from hybrid.model.varlen import has_kernel, kernel_attention

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]])
HEADS, D = (4, 2), 8


def qkv(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    s, b, generator = SEGMENTS.size(1), SEGMENTS.size(0), torch.Generator().manual_seed(0)
    shapes = [(s, b, heads, D) for heads in (HEADS[0], HEADS[1], HEADS[1])]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def block_mask() -> torch.Tensor:
    """[b, 1, s, s], by the definition: not later, and of the same document."""
    s = SEGMENTS.size(1)
    seen = [[[k <= q and row[k] == row[q] for k in range(s)] for q in range(s)] for row in SEGMENTS.tolist()]
    return torch.tensor(seen).unsqueeze(1)


def outputs_and_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def test_documents_are_found() -> None:
    documents = Documents.of(SEGMENTS)
    assert documents.lengths == ((3, 2, 1), (1, 1, 4))
    assert documents.offsets.tolist() == [0, 3, 5, 6, 7, 8, 12] and documents.offsets.dtype == torch.int32
    assert documents.longest == 4 and documents.several
    assert not Documents.of(torch.zeros(2, 6)).several
    assert Documents.of(torch.tensor([[0, 0], [0, 1]])).several


def test_positions_start_anew() -> None:
    assert segment_positions(SEGMENTS).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


def test_rope_is_taken_at_the_document_positions() -> None:
    tables = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 1, 4), torch.zeros(6, 1, 1, 4)
    cos, _ = segment_rope(tables, SEGMENTS)
    assert cos.shape == (6, 2, 1, 4)
    assert cos[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize("rows", [slice(0, 2), slice(0, 1)], ids=["two rows", "one row"])
@pytest.mark.parametrize("grouped_kernel", [True, False])
def test_attention_is_that_of_the_block_mask(
    monkeypatch: pytest.MonkeyPatch, grouped_kernel: bool, rows: slice
) -> None:
    monkeypatch.setattr(attention, "_grouped_kernel", lambda q, mask: grouped_kernel)
    inputs = [x[:, rows].detach().requires_grad_() for x in qkv()]
    documents = Documents.of(SEGMENTS[rows])
    found = outputs_and_gradients(document_attention(*inputs, documents), inputs)
    expected = outputs_and_gradients(causal_attention(*inputs, mask=block_mask()[rows]), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # fp32, another order of sums


def test_dropout_falls_on_each_document() -> None:
    """Of a document's first token, which sees itself only, either all or nothing is left."""
    q, k, v = qkv()
    torch.manual_seed(0)
    out = document_attention(q, k, v, Documents.of(SEGMENTS), dropout=0.5).unflatten(2, (HEADS[0], D))
    first = out[segment_positions(SEGMENTS).t() == 0]  # [documents, heads, d]
    own = v[segment_positions(SEGMENTS).t() == 0].repeat_interleave(HEADS[0] // HEADS[1], dim=1)
    kept = (first != 0).any(-1)
    assert kept.any() and not kept.all()
    torch.testing.assert_close(first[kept], own[kept] * 2)


def test_the_kernel_is_for_gpus() -> None:
    assert not has_kernel(torch.zeros(2, 1, 4, D, dtype=torch.bfloat16), 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length attention has a kernel on GPUs only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_gives_what_documents_apart_give(dtype: torch.dtype) -> None:
    inputs, documents = qkv("cuda", dtype), Documents.of(SEGMENTS.cuda())
    if not has_kernel(inputs[0], 0.0):
        pytest.skip("this GPU, or this torch, has no variable-length attention with shared key/value heads")
    found = outputs_and_gradients(kernel_attention(*inputs, documents), inputs)
    exact = [x.detach().cpu().float().requires_grad_() for x in inputs]
    expected = outputs_and_gradients(document_attention(*exact, Documents.of(SEGMENTS)), exact)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.cpu().float(), want, rtol=2e-2, atol=2e-2)  # bf16 has 8 bits
