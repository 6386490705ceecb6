"""The search for layouts, its answers in words, and the configuration it writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from hybrid.config.errors import ConfigError
from hybrid.config.load import find_config, load_config, read_config
from hybrid.config.model import load_model_config
from hybrid.pipeline.rounds import pipeline_rounds
from hybrid.planner.ask import planner_model, request_of, scaling
from hybrid.planner.banner import banner
from hybrid.planner.estimate import estimate
from hybrid.planner.hardware import gpu_names, load_gpu
from hybrid.planner.memory import fullest_stage, rank_memory
from hybrid.planner.runs import workload_of
from hybrid.planner.search import RESERVE_GIB, Request, evaluate, search
from hybrid.planner.text import counted, describe_search, layout_name
from hybrid.planner.workload import Workload
from hybrid.planner.write import config_of


def ask(model: str = "llama3-70b", gpus: int = 64, **changes: Any) -> Request:
    values: dict[str, Any] = {"gpu": load_gpu("h100"), "seq_length": 8192, "global_batch": 1024, **changes}
    return Request(model=load_model_config(model), gpus=gpus, **values)


def test_a_large_model_on_a_cluster() -> None:
    found = search(ask())
    assert found.feasible and found.too_large
    rates = [c.estimate.tokens_per_second for c in found.feasible]
    assert rates == sorted(rates, reverse=True)
    for c in found.feasible:
        w = c.workload
        assert c.memory.total <= (79.1 - RESERVE_GIB) * 2**30
        assert w.t * w.p * w.d == 64 and w.micro_batch_size * w.micro_batches * w.d == 1024
        assert sum(w.layers_per_stage) == 80
    assert all(c.memory.total > c.available for c in found.too_large)
    # 70 B parameters need 16 bytes each: one replica on 8 GPUs does not fit without sharding over data parallelism.
    assert not any(c.workload.t * c.workload.p < 8 for c in found.feasible if c.workload.zero_stage == 1)


def test_nothing_fits_and_why() -> None:
    request = ask("llama3-70b", gpus=1, global_batch=8)
    found = search(request)
    text = "\n".join(describe_search(request, found, 5))
    assert not found.feasible and "no layout fits" in text and "weights, gradients and states" in text


def test_what_is_ruled_out() -> None:
    found = search(ask("llama2-7b", gpus=96, seq_length=4095, global_batch=100))
    reasons = " ".join(found.excluded)
    assert "TP 3 does not divide heads" in reasons and "cannot be cut over DP" in reasons
    assert "4095 tokens cannot be cut over TP 2" in reasons
    assert "TP 16 is more than the 8 GPUs of a node" in reasons


@pytest.mark.parametrize("case", [("llama3-70b", 64, 0), ("llama2-7b", 8, 0), ("llama2-7b", 8, -1)])
def test_a_written_configuration_is_the_chosen_layout(tmp_path: Any, case: tuple[str, int, int]) -> None:
    model, gpus, choice = case
    chosen = search(ask(model, gpus, seq_length=4096)).feasible[choice].workload
    path = tmp_path / "my.json"
    path.write_text(json.dumps(config_of(chosen, model)))
    got = workload_of(load_config(str(path), world_size=gpus))
    assert dataclasses.replace(got, bucket_size=chosen.bucket_size) == chosen
    assert got.bucket_size == chosen.bucket_size


def test_interleaved_layouts_are_ranked_and_written(tmp_path: Any) -> None:
    found = search(ask(gpus=64))
    interleaved = [c for c in found.feasible + found.too_large if c.workload.chunks > 1]
    assert any(c.fits for c in interleaved)
    for c in interleaved:
        w = c.workload
        assert w.chunks == 2 and w.p > 1 and 80 % (2 * w.p) == 0 and w.micro_batches % w.p == 0
    chosen = next(c.workload for c in interleaved if c.fits)
    assert layout_name(chosen).split()[2] == "x2"
    path = tmp_path / "my.json"
    base = {"hybrid": {"pipeline_schedule": "interleaved", "pipeline_chunks": 5}, "bf16": {"enabled": True}}
    path.write_text(json.dumps(config_of(chosen, "llama3-70b", base)))
    got = workload_of(load_config(str(path), world_size=64))
    assert dataclasses.replace(got, bucket_size=0) == dataclasses.replace(chosen, bucket_size=0)
    simple = next(c.workload for c in found.feasible if c.workload.chunks == 1)
    assert "pipeline_schedule" not in config_of(simple, "llama3-70b", base)["hybrid"]


def test_a_long_interleaved_step_holds_what_its_first_groups_hold() -> None:
    alone = search(ask(gpus=1)).too_large[0].workload
    for p, v in itertools.product((2, 3, 4), (2, 3)):
        for rank in range(p):
            held, moments = [0] * v, set()
            for forward, backward in pipeline_rounds(9 * p, p, rank, v):
                if forward is not None:
                    held[forward[0]] += 1
                    moments.add(tuple(held))
                if backward is not None:
                    held[backward[0]] -= 1
            parallel = dataclasses.replace(alone.parallel, pipeline_model_parallel_size=p)
            w = dataclasses.replace(alone, parallel=parallel, layers_per_stage=(1,) * (p * v), micro_batches=9 * p)
            assert w.in_flight(rank) == sorted(moments)


def test_a_base_configuration_keeps_its_settings(tmp_path: Any) -> None:
    base = json.loads(json.dumps({
        "train_batch_size": 64, "fp16": {"enabled": True}, "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2},
        "hybrid": {"model": "llama2-7b", "tensor_model_parallel_size": 4, "data": {"seq_length": 2048},
                   "training": {"train_steps": 7}},
    }))  # fmt: skip
    request = request_of(base, None, 8, "a100", None, None)
    assert (request.seq_length, request.global_batch, request.optimizer_states) == (2048, 64, 1)
    assert request.precision == "fp16"
    chosen = search(request).feasible[0].workload
    path = tmp_path / "my.json"
    path.write_text(json.dumps(config_of(chosen, "llama2-7b", base)))
    run = load_config(str(path), world_size=8)
    assert run.optimizer_type == "Lion" and run.precision == "fp16" and run.hybrid.training.train_steps == 7
    assert dataclasses.replace(workload_of(run), bucket_size=0) == dataclasses.replace(chosen, bucket_size=0)


def test_adapters_need_less(tmp_path: Any) -> None:
    """70B on 8 GPUs: only adapters fit, and training them is faster than training all weights would be."""
    tree = read_config(find_config("lora_tp2"))
    request = request_of(tree, "llama3-70b", 8, "h100", 4096, 64)
    found, whole = search(request), search(dataclasses.replace(request, lora=None))
    assert found.feasible and not whole.feasible
    assert "training LoRA of rank 16 on 7 projections" in "\n".join(describe_search(request, found, 1))

    path, best = tmp_path / "chosen.json", found.feasible[0]
    path.write_text(json.dumps(config_of(best.workload, "llama3-70b", tree)))
    written = workload_of(load_config(str(path), world_size=8))
    assert (written.lora, written.parallel) == (request.lora, best.workload.parallel)
    all_weights = dataclasses.replace(best.workload, lora=None)
    # 2 bytes a weight of 18, and the adapters.
    memory, unfrozen = fullest_stage(best.workload)[1], fullest_stage(all_weights)[1]
    assert memory.frozen == unfrozen.parameters and 2 / 18 < memory.held / unfrozen.held < 2.1 / 18
    assert best.estimate.time.compute < 0.8 * estimate(all_weights, best.gpu).time.compute


def test_shipped_configurations_for_clusters_fit() -> None:
    for name, gpus in (("llama2_7b_tp8_pp1", 64), ("llama3_70b_tp8_pp8", 128), ("llama3_8b_tp4_pp2", 64)):
        w = workload_of(load_config(name, world_size=gpus))
        assert evaluate(w, load_gpu("h100")).fits, name


def test_more_of_everything_costs_more() -> None:
    w = workload_of(load_config("llama3_70b_tp8_pp8", world_size=128))
    total = fullest_stage(w)[1].total
    assert fullest_stage(dataclasses.replace(w, micro_batch_size=2))[1].total > total
    assert fullest_stage(dataclasses.replace(w, recompute="none"))[1].total > total
    assert fullest_stage(dataclasses.replace(w, recompute="full"))[1].total < total
    memories = [rank_memory(w, stage).total for stage in range(1, w.p - 1)]
    assert memories == sorted(memories, reverse=True), "earlier stages hold more microbatches"
    gpu = load_gpu("h100")
    time = estimate(w, gpu).time
    assert estimate(dataclasses.replace(w, recompute="full"), gpu).time.compute > time.compute
    assert estimate(w, load_gpu("a100")).time.total > time.total


def test_the_bubble_is_one_slot_of_each_other_stage() -> None:
    model = load_model_config("llama2-7b")
    w = Workload(
        model=model, parallel=ask(gpus=1).model and load_config("llama2_7b_tp8_pp1", world_size=64).parallel,
        layers_per_stage=(32,), seq_length=4096, micro_batch_size=1, micro_batches=8,
    )  # fmt: skip
    assert estimate(w, load_gpu("h100")).time.bubble == pytest.approx(0.0, abs=1e-12)
    pp = dataclasses.replace(
        w,
        parallel=dataclasses.replace(w.parallel, pipeline_model_parallel_size=4, data_parallel_size=2),
        layers_per_stage=(8, 8, 8, 8),
    )
    time = estimate(pp, load_gpu("h100")).time
    assert time.bubble / (time.compute + time.tensor) == pytest.approx(3 / 8, rel=0.15)


def test_scaling_keeps_or_grows_the_batch() -> None:
    requests = [request_of(None, "llama-175b", n, "h100", 4096, 512) for n in (64, 512)]
    strong, weak = scaling(requests).values()
    assert [r.global_batch for r, _ in strong] == [512, 512] and [r.global_batch for r, _ in weak] == [512, 4096]
    (_, small), (_, large) = weak
    assert small is not None and large is not None
    assert large.estimate.tokens_per_second == pytest.approx(small.estimate.tokens_per_second, rel=0.1)


def test_gpus_of_the_table_and_custom_ones(tmp_path: Any) -> None:
    assert {"a100", "h100", "h200", "b200", "l40s"} <= set(gpu_names())
    assert all(load_gpu(name).source and load_gpu(name).matrix_flops > 1e14 for name in gpu_names())
    custom = tmp_path / "mine.json"
    values = {"bf16_tflops": 100, "memory_gib": 24, "memory_gb_per_second": 900, "link_gb_per_second": 16,
              "network_gb_per_second": 3, "gpus_per_node": 4}  # fmt: skip
    custom.write_text(json.dumps(values))
    assert load_gpu(str(custom)).matrix_flops == 1e14
    custom.write_text(json.dumps({**values, "memory_gib": -1, "colour": "red"}))
    with pytest.raises(ConfigError, match=r"memory_gib is -1[\s\S]*colour"):
        load_gpu(str(custom))
    with pytest.raises(ConfigError, match="did you mean h100"):
        load_gpu("h1000")


def test_models_to_plan_with() -> None:
    assert planner_model("llama2-7b") == "llama2-7b"
    shape = planner_model("llama-1t")
    assert isinstance(shape, dict) and shape["num_hidden_layers"] == 128
    with pytest.raises(ConfigError, match="neither a preset"):
        planner_model("llama-2t")


def test_banner() -> None:
    text = "\n".join(banner(load_config("llama3_70b_tp8_pp8", world_size=128), steps_done=10))
    assert "TP8+SP PP8 DP2" in text and "memory planned" in text and "steps 11 to" in text
    assert "weight gathers behind the next forward" in text
    assert "decoder layers" in "\n".join(banner(load_config("z2_tp2_pp2", world_size=4)))
    adapters = "\n".join(banner(load_config("lora_tp2", world_size=2)))
    assert "LoRA of rank 16 on 7 projections" in adapters and "behind weight gradients" not in adapters


def test_one_is_not_several() -> None:
    request = ask("llama3-70b", gpus=1, global_batch=1)
    text = "\n".join(describe_search(request, search(request), 5))
    assert "1 sample of 8192" in text and "1 does not fit" in text
    assert [counted(n, "microbatch", "microbatches") for n in (1, 2)] == ["1 microbatch", "2 microbatches"]
    assert [counted(n, "replica") for n in (1, 2)] == ["1 replica", "2 replicas"]
