"""One process alone, in a bare loop: the ideal that ratios refer to, and the Hugging Face model without any engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.workload import CLIPPING, OPTIMIZER, SEED, Batch, Workload
from hybrid.config.model import LlamaConfig
from hybrid.model.block import TransformerBlock
from hybrid.model.init import init_parameters, initial_tensor
from hybrid.model.norm import RMSNorm
from hybrid.model.rope import rope_tables
from hybrid.tensor_parallel.context import TensorParallel
from hybrid.tensor_parallel.embedding import VocabParallelEmbedding, vocab_parallel_weight
from hybrid.tensor_parallel.linear_cross_entropy import linear_cross_entropy

Step = Callable[[], torch.Tensor]
"""One whole optimizer step, with nothing left in flight; the mean loss of the microbatches this process knows of."""
Loss = Callable[[Batch], torch.Tensor]
"""Mean loss of a microbatch."""
Around = Callable[[bool], contextlib.AbstractContextManager[object]]
"""What a microbatch's forward and backward run in, given whether it is the step's last."""


def nothing(last: bool) -> contextlib.AbstractContextManager[object]:
    """No context."""
    return contextlib.nullcontext()


def accumulate(loss: Loss, batches: Sequence[Batch], around: Around = nothing) -> torch.Tensor:
    """Add up the gradient of the mean loss over all microbatches; that loss."""
    losses = []
    for index, batch in enumerate(batches):
        with around(index == len(batches) - 1):
            mean = loss(batch)
            (mean / len(batches)).backward()
        losses.append(mean.detach())
    return torch.stack(losses).mean()


def parameter_groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """For torch's optimizers: norms do not decay."""
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]


class MasterWeights:
    """Mixed precision with the least work: bf16 gradients, fp32 masters, fused AdamW, foreach copies between them."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)
        self._values = [self.local(param.detach()) for param in self._params]
        self._masters = [nn.Parameter(value.float()) for value in self._values]
        self._grads = [torch.zeros_like(master) for master in self._masters]
        for master, grad in zip(self._masters, self._grads, strict=True):
            master.grad = grad
        self._optimizer = torch.optim.AdamW(parameter_groups(self._masters), fused=True, **OPTIMIZER)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This process's part of a parameter."""
        return tensor

    def local_grad(self, param: nn.Parameter) -> torch.Tensor:
        """This process's part of a parameter's gradient."""
        assert param.grad is not None
        return param.grad

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the whole model's gradient."""
        return nn.utils.get_total_norm(grads, foreach=True)

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update the masters, round them into the parameters, and drop the gradients."""
        torch._foreach_copy_(self._grads, [self.local_grad(param) for param in self._params])
        nn.utils.clip_grads_with_norm_(self._masters, CLIPPING, self.norm(self._grads), foreach=True)
        self._optimizer.step()
        torch._foreach_copy_(self._values, [master.detach() for master in self._masters])
        for param in self._params:
            param.grad = None


def loop(params: Sequence[nn.Parameter], loss: Loss, batches: Sequence[Batch]) -> Step:
    """Gradient accumulation over `batches`, then the update."""
    weights = MasterWeights(params)

    def step() -> torch.Tensor:
        mean = accumulate(loss, batches)
        weights.step()
        return mean

    return step


class BareLlama(nn.Module):
    """This package's layers, one after the other."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        tp = TensorParallel.single()
        self.config, self.tp = config, tp
        vocab = (config.vocab_size, config.hidden_size)
        common: dict[str, Any] = {"tp": tp, "dtype": torch.bfloat16, "device": torch.device("cpu")}
        self.embedding = VocabParallelEmbedding(*vocab, name="model.embed_tokens", **common)
        self.blocks = nn.ModuleList(TransformerBlock(config, i, **common) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, name="model.norm", **common)
        self.head = vocab_parallel_weight(*vocab, name="lm_head", **common)
        self._rope = functools.lru_cache(maxsize=1)(functools.partial(rope_tables, config))
        init_parameters(self, SEED, config.initializer_range)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss of ids and shifted labels, each [b, s]."""
        hidden = self.embedding(ids)
        rope = self._rope(ids.size(1), ids.device)
        for block in self.blocks:
            hidden = block(hidden, rope)
        loss, tokens = linear_cross_entropy(
            self.norm(hidden), self.head, labels, vocab_size=self.config.vocab_size, tp=self.tp
        )
        return loss / tokens


def bare_loop(workload: Workload) -> Step:
    """The ideal: this package's layers, no engine, no communication."""
    model = BareLlama(workload.config)
    return loop(list(model.parameters()), lambda batch: model(*batch), workload.batches(workload.sequences, seed=0))


def hugging_face_model(workload: Workload) -> nn.Module:
    """transformers' LlamaForCausalLM in bf16, with torch's attention and this package's initial weights."""
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    options: dict[str, Any] = {**workload.config.to_hf("bf16"), "use_cache": False, "attn_implementation": "sdpa"}
    model: nn.Module = LlamaForCausalLM(HFConfig(**options))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1:  # norms are ones already
                param.copy_(initial_tensor(SEED, name, param.shape, workload.config.initializer_range))
    return model.to(torch.bfloat16)


def hugging_face_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """transformers' own loss."""
    ids, labels = batch
    loss: torch.Tensor = model(input_ids=ids, labels=labels, shift_labels=labels).loss
    return loss


def hugging_face_loop(workload: Workload) -> Step:
    """The Hugging Face model with fused AdamW, in the same loop as the ideal."""
    model = hugging_face_model(workload)
    batches = workload.batches(workload.sequences, seed=dist.get_rank())
    return loop(list(model.parameters()), lambda batch: hugging_face_loss(model, batch), batches)
