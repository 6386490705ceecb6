"""Gradients that layers hand over as products: the same sums, without a gradient in between."""

import pytest
import torch
from support.llama import make_batches, make_engine, my_batches, small_config

from hybrid.optim.products import sum_product, sums_products
from hybrid.tensor_parallel.params import set_gradient_sink


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_written_or_added(dtype):
    left, right = torch.randn(3, 5, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    out = torch.full((3, 4), torch.nan, dtype=dtype)
    assert sums_products(out, left)
    sum_product(out, left, right, first=True)
    assert torch.equal(out, left @ right)
    sum_product(out, left, right, first=False)
    torch.testing.assert_close(out, 2 * (left @ right))


def test_a_cpu_keeps_no_fp32_of_bf16_factors():
    assert not sums_products(torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpu_adds_half_precision_products_in_fp32(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    left, right = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((64, 256), (256, 32)))
    out = torch.zeros(64, 32, device="cuda")
    if not sums_products(out, left):
        pytest.skip("this version of torch has no GEMM with an fp32 result of half precision factors")
    for count in (1, 2):
        sum_product(out, left, right, first=count == 1)
        torch.testing.assert_close(out, count * (left.float() @ right.float()), rtol=1e-5, atol=1e-4)


def gradients(stage, micro_batches, *, straight, recompute="none"):
    """The sums of one step's gradients on this rank, and how many parameters' were ever made by autograd."""
    config = small_config()
    engine, grid = make_engine(config, stage=stage, micro_batches=micro_batches, recompute=recompute)
    optimizer, made = engine.optimizer, set()
    for index, param in enumerate(optimizer.params):
        if not straight:
            set_gradient_sink(param, lambda left, right: False)
        param.register_hook(lambda grad, index=index: None if grad is None else made.add(index))
    step, sums = optimizer.step, []

    def keep_and_step():
        optimizer.gradients.finish()
        sums.extend(optimizer.gradients.view(piece).clone() for piece in optimizer.pieces)
        step()

    optimizer.step = keep_and_step
    batches = make_batches(micro_batches * grid.parallel.data_parallel_size, 2, 8, config.vocab_size)
    engine.train_batch(iter(my_batches(batches, grid, micro_batches)))
    return sums, len(made), len(optimizer.params)


def both_ways(stage, micro_batches, recompute):
    return [gradients(stage, micro_batches, straight=way, recompute=recompute) for way in (True, False)]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 1), (1, 3), (2, 2)])
def test_sums_are_those_of_autograds_gradients(pool, stage, micro_batches, recompute):
    for (straight, made, params), (usual, all_made, _) in pool.run(both_ways, 2, stage, micro_batches, recompute):
        # What is left to autograd are the embedding and the norms: two a layer, and the last.
        layers = small_config().num_hidden_layers
        assert all_made == params and made == params - (4 * layers + 1) == 2 * layers + 2
        for got, want in zip(straight, usual, strict=True):
            if stage == 1 and micro_batches > 1:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))
            else:
                assert torch.equal(got, want)
