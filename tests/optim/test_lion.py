"""Lion against its algorithm, one element at a time."""

import math

import torch

from hybrid.optim.build import optimizer_factory


def test_follows_the_algorithm():
    rate, beta1, beta2, decay = 0.1, 0.9, 0.99, 0.01
    start, gradients = [1.0, -2.0, 0.5], [[0.3, -0.2, 0.0], [-4.0, 0.1, 0.0], [0.2, 0.2, -1.0]]
    param = torch.nn.Parameter(torch.tensor(start))
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizer_factory("lion", {"lr": rate, "betas": [beta1, beta2], "weight_decay": decay})(
        [{"params": [param, unused]}]
    )
    weights, moments = list(start), [0.0] * 3
    for step in gradients:
        param.grad = torch.tensor(step)
        optimizer.step()
        for i, g in enumerate(step):
            update = beta1 * moments[i] + (1 - beta1) * g
            sign = math.copysign(1.0, update) if update else 0.0
            weights[i] -= rate * (sign + decay * weights[i])
            moments[i] = beta2 * moments[i] + (1 - beta2) * g
        torch.testing.assert_close(param.detach(), torch.tensor(weights))
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], torch.tensor(moments))
    assert torch.equal(unused.detach(), torch.ones(2)) and set(optimizer.state) == {param}
