"""What a step of an engine really holds, moves and computes on each rank, to hold the planner's formulas against."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from support.llama import make_batches, make_engine, my_batches, small_config
from support.tracer import Tracer

from hybrid.config.parallel import ParallelConfig, split_layers
from hybrid.config.training import LoraConfig
from hybrid.metrics.meter import TrafficMeter
from hybrid.optim.state import memory_bytes
from hybrid.planner.workload import Workload

SHAPE: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SEQ, BUCKET = 64, 30_000

Case = dict[str, Any]


def case(tp: int = 1, pp: int = 1, dp: int = 1, **changes: Any) -> Case:
    """One layout of the small model; `model` changes its shape."""
    defaults = {"sp": False, "chunks": 1, "stage": 1, "recompute": "none", "micro_batches": 2, "batch": 1,
                "dtype": "bf16", "wire": "fp32", "gradient_sharding": "step", "model": {}, "seq": SEQ,
                "lora": None}  # fmt: skip
    return {**defaults, "tp": tp, "pp": pp, "dp": dp, **changes}


def case_name(c: Case) -> str:
    """A short id."""
    extra = [f"x{c['chunks']}"] * (c["chunks"] > 1) + [
        str(c[k]) for k in ("recompute", "dtype", "wire") if c[k] not in ("none", "bf16", "fp32")
    ]
    model = "".join(f"-{k}{v}" for k, v in c["model"].items())
    adapters = f"-lora {c['lora']}" if c["lora"] else ""
    sharding = f"-{c['gradient_sharding']}" if c["stage"] == 2 else ""
    name = f"tp{c['tp']}pp{c['pp']}dp{c['dp']}{'sp' if c['sp'] else ''}-z{c['stage']}{sharding}-b{c['batch']}"
    return "-".join([f"{name}m{c['micro_batches']}", *extra]) + model + adapters


def adapters(c: Case) -> LoraConfig | None:
    """What a case has under `lora`, if it has."""
    return None if c["lora"] is None else LoraConfig(**c["lora"])


def workload(c: Case) -> Workload:
    """What the planner is told."""
    model = small_config(**{**SHAPE, **c["model"]})
    return Workload(
        model=model,
        parallel=ParallelConfig(
            tensor_model_parallel_size=c["tp"],
            pipeline_model_parallel_size=c["pp"],
            data_parallel_size=c["dp"],
            sequence_parallel=c["sp"],
        ),
        layers_per_stage=split_layers(model.num_hidden_layers, c["pp"] * c["chunks"]),
        seq_length=c["seq"],
        micro_batch_size=c["batch"],
        micro_batches=c["micro_batches"],
        precision=c["dtype"],
        recompute=c["recompute"],
        zero_stage=c["stage"],
        gradient_sharding=c["gradient_sharding"],
        bucket_size=BUCKET,
        wire=c["wire"],
        lora=adapters(c),
    )


def engine_of(c: Case) -> Any:
    """The engine and grid of a case, and an endless supply of batches."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    config = small_config(**{**SHAPE, **c["model"]})
    engine, grid = make_engine(
        config,
        tp=c["tp"],
        pp=c["pp"],
        sp=c["sp"],
        chunks=c["chunks"],
        stage=c["stage"],
        micro_batches=c["micro_batches"],
        batch=c["batch"],
        seq=c["seq"],
        dtype=dtypes[c["dtype"]],
        recompute=c["recompute"],
        bucket_size=BUCKET,
        wire_dtype=dtypes[c["wire"]],
        gradient_sharding=c["gradient_sharding"],
        lora=adapters(c),
    )
    batches = make_batches(4 * c["micro_batches"] * c["dp"], c["batch"], c["seq"], config.vocab_size)
    return engine, grid, iter(my_batches(batches, grid, c["micro_batches"]))


def measure(c: Case) -> dict[str, Any]:
    """This rank's place, its optimizer's bytes, its transfers in a step, and the bytes alive around the forwards."""
    engine, grid, batches = engine_of(c)
    engine.train_batch(batches)
    with TrafficMeter(grid) as meter:
        engine.train_batch(batches)
        engine.optimizer.wait_parameters()
    calls = Counter((x.axis, x.op, x.group_size, x.payload) for x in meter.calls)
    after: list[int] = []
    with Tracer() as tracer:
        engine.module.register_forward_hook(lambda *_: after.append(tracer.settled_bytes()))
        engine.train_batch(batches)
        engine.optimizer.wait_parameters()
    return {
        "place": (grid.pipe_rank, grid.tensor_rank, grid.data_rank),
        "memory": memory_bytes(engine.optimizer),
        "calls": dict(calls),
        "after_forward": max(after),
        "peak": tracer.peak_bytes,
        "flops": tracer.flops,
    }


def held_by_one_forward(c: Case) -> dict[str, Any]:
    """This rank's place, and the bytes a forward of its stage leaves behind: all storages, and saved tensors alone.

    And those of the largest tensor that any operator made.
    """
    engine, grid, batches = engine_of(c)
    config, module, seq = engine.module.config, engine.module, c["seq"]
    ids, labels = next(batches)
    inputs = ids
    if grid.pipe_rank > 0:
        tokens = seq // c["tp"] if c["sp"] else seq
        dtype = next(module.parameters()).dtype
        inputs = torch.randn(tokens, c["batch"], config.hidden_size, dtype=dtype, requires_grad=True)
    module._rope(seq, inputs.device)  # the tables are made once, not per microbatch
    outside = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Tracer() as tracer, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(inputs)
        if grid.is_last_stage:
            output = module.loss_fn(output, labels)
    alive = tracer.settled_bytes() + (inputs.nbytes if grid.pipe_rank > 0 else 0)
    tables = sum(t.nbytes for t in module._rope(seq, inputs.device))
    return {
        "place": (grid.pipe_rank, grid.tensor_rank, grid.data_rank),
        "alive": alive,
        "saved": sum(saved.values()) - tables,
        "output": output[0].nbytes if isinstance(output, tuple) else output.nbytes,
        "largest": tracer.largest_bytes,
    }
