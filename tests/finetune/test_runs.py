"""Fine-tuning runs: one step against transformers, adapters that PEFT loads, resumption, a larger vocabulary."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.chats import tree, write_chats, write_model
from support.pool import WorkerPool

from hybrid.agreement import RemoteError
from hybrid.config.resolve import resolve_config
from hybrid.convert.names import state_key
from hybrid.convert.sources import open_checkpoint
from hybrid.data.chat.build import ChatSpec, build_chat_data
from hybrid.evaluation import Request, evaluate
from hybrid.finetune.data import chat_data
from hybrid.tensor_parallel.lora import adapter_name
from hybrid.trainer import Trainer

TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, TP), (2, PP), (2, {})]
LORA = {"r": 4, "alpha": 8.0}
SGD = {"type": "SGD", "params": {"lr": 1.0, "weight_decay": 0.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "chat.jsonl")


def finetune(config: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank; the losses and norms of its steps."""
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    run = resolve_config(config, dist.get_world_size())
    seen = []
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(run, torch.device("cpu"), None, chat_data(), keep_best=True)
        train_batch = trainer.engine.train_batch

        def watched(batches: Any) -> Any:
            result = train_batch(batches)
            step = trainer.engine.optimizer.result
            assert step is not None
            seen.append((step.loss, step.grad_norm, step.tokens))
            return result

        trainer.engine.train_batch = watched  # type: ignore[method-assign]
        code = trainer.train()
    return {"steps": seen, "code": code}


def reference_step(model: Path, chats: Path, seed: int, rows: int, packing: bool) -> tuple[float, int, dict[str, Any]]:
    """(loss, tokens, gradients) of transformers over the samples of the first rows, each sample by itself."""
    from transformers import LlamaForCausalLM

    spec = ChatSpec(
        source=str(chats), tokenizer=str(model), seq_length=160, vocab_size=10**6, seed=seed, eval_fraction=0.1,
        cache_dir=str(chats.parent / "cache"), packing=packing,
    )  # fmt: skip
    train = build_chat_data(spec).train
    oracle = LlamaForCausalLM.from_pretrained(model)
    total, tokens = torch.zeros(()), 0
    order = [int(train._order(0)[index]) for index in range(rows)]
    for member in [member for row in order for member in train.packs.row(row)]:
        ids, supervised = (torch.tensor(part.tolist()) for part in train.corpus.sample(int(member)))
        labels = torch.where(supervised, ids, -100)
        logits = oracle(input_ids=ids.unsqueeze(0)).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        tokens += int((labels[1:] != -100).sum())
    (total / tokens).backward()
    gradients = {name: param.grad for name, param in oracle.named_parameters()}
    return total.item() / tokens, tokens, gradients


@pytest.mark.parametrize(
    ("world", "layout", "packing"), [*((*layout, True) for layout in LAYOUTS), (2, {}, False)], ids=str
)
def test_one_step_is_that_of_transformers(
    pool: WorkerPool, tmp_path: Path, model: Path, chats: Path, world: int, layout: dict[str, Any], packing: bool
) -> None:
    """On each sample alone: neither packing nor microbatches nor replicas change what a token counts."""
    config = tree(
        tmp_path / "run", model, chats, layout=layout, train_steps=1, optimizer=SGD, finetune={"packing": packing},
        lr_schedule={"type": "constant"},
    )  # fmt: skip
    loss, tokens, gradients = reference_step(model, chats, 3, 4, packing)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for result in pool.run(finetune, world, config):
        ((got_loss, got_norm, got_tokens),) = result["steps"]
        assert got_tokens == tokens and got_loss == pytest.approx(loss, rel=1e-5)
        assert got_norm == pytest.approx(norm, rel=1e-5)
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, gradient in gradients.items():
        change = before[name] - after[name]
        # The change is read off weights of size 0.1 to 1, which rounds it at 6e-8.
        assert (change - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7 * gradient.numel() ** 0.5, name


@pytest.mark.parametrize(("world", "layout"), LAYOUTS[1:], ids=str)
def test_the_adapter_is_pefts_and_the_base_is_untouched(
    pool: WorkerPool, tmp_path: Path, model: Path, chats: Path, world: int, layout: dict[str, Any]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "run"
    config = tree(output, model, chats, layout=layout, lora=LORA, train_steps=4, eval_every=2, batch=8)
    results = pool.run(finetune, world, config)
    losses = [loss for loss, _, _ in results[0]["steps"]]
    assert losses[-1] < losses[0]
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(base, output / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(output / "model")
    ids = torch.arange(3, 43).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=0, atol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(model)(input_ids=ids).logits
        assert (adapted(input_ids=ids).logits - plain).abs().max() > 1e-2
    before, after = load_file(model / "model.safetensors"), load_file(output / "model" / "model.safetensors")
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == ("_proj" not in name), name
    checkpoint = next((output / "checkpoints").glob("step-*"))
    store = open_checkpoint(checkpoint).store
    assert all(torch.equal(weight, store.read(name)) for name, weight in before.items())
    assert (output / "best" / "adapter_config.json").is_file() and not (output / "best" / "config.json").exists()
    best = json.loads((output / "best.json").read_text())
    evaluations = [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]
    assert best["eval_loss"] == min(line["eval_loss"] for line in evaluations)
    for folder in ("adapter", "model"):
        assert AutoTokenizer.from_pretrained(output / folder).chat_template
    generation = json.loads((output / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 1


@pytest.mark.parametrize(("world", "layout"), [(4, {}), (4, {**TP, **PP})], ids=["DP 4", "TP 2, PP 2"])
def test_adapters_are_written_from_the_masters(
    pool: WorkerPool, tmp_path: Path, model: Path, chats: Path, world: int, layout: dict[str, Any]
) -> None:
    """Of a run in bf16, bitwise and in fp32; the merged model in bf16 is off by its own rounding only."""
    config = tree(tmp_path / "run", model, chats, layout=layout, lora=LORA, train_steps=3)
    pool.run(finetune, world, {**config, "bf16": {"enabled": True}})
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    store = open_checkpoint(next((tmp_path / "run" / "checkpoints").glob("step-*"))).store
    assert len(adapter) == 2 * 7 * 2
    for name, matrix in adapter.items():
        assert matrix.dtype == torch.float32 and not torch.equal(matrix, matrix.bfloat16().float()), name
        assert torch.equal(matrix, store.read(state_key(name, "master"))), name
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name, weight in before.items():
        wanted = weight.bfloat16().float()
        if "_proj" in name:
            a, b = (adapter[adapter_name(name, matrix)] for matrix in "AB")
            wanted = wanted + LORA["alpha"] / LORA["r"] * (b @ a)
        assert after[name].dtype == torch.bfloat16
        torch.testing.assert_close(after[name].float(), wanted, rtol=2**-8, atol=1e-7)  # half a unit of 8 bits


def test_adapters_go_on_from_a_checkpoint_of_another_layout(
    pool: WorkerPool, tmp_path: Path, model: Path, chats: Path
) -> None:
    whole = tree(tmp_path / "whole", model, chats, layout={}, lora=LORA, train_steps=4)
    ((expected),) = pool.run(finetune, 1, whole)
    first = tree(tmp_path / "parts", model, chats, layout=TP, lora=LORA, train_steps=4, stop_after_steps=2)
    second = tree(tmp_path / "parts", model, chats, layout=PP, lora=LORA, train_steps=4)
    steps = pool.run(finetune, 2, first)[0]["steps"] + pool.run(finetune, 2, second)[0]["steps"]
    for (loss, norm, tokens), (want_loss, want_norm, want_tokens) in zip(steps, expected["steps"], strict=True):
        assert tokens == want_tokens
        assert loss == pytest.approx(want_loss, rel=1e-4) and norm == pytest.approx(want_norm, rel=1e-3)
    for lora, message in (
        ({**LORA, "r": 2}, "lora.r is 4 in the checkpoint, 2 in this run"),
        ({**LORA, "alpha": 4.0}, "lora.alpha is 8.0 in the checkpoint, 4.0 in this run"),
        ({**LORA, "targets": ["q_proj"]}, "lora.targets is .* in the checkpoint"),
        (None, "hybrid.lora is .* in the checkpoint, null in this run"),
    ):
        other = tree(tmp_path / "parts", model, chats, layout={}, lora=lora, train_steps=6)
        with pytest.raises(ValueError, match=message):
            pool.run(finetune, 1, other)


def test_rows_for_new_tokens_are_the_mean(pool: WorkerPool, tmp_path: Path, chats: Path) -> None:
    """A model of 290 tokens and a tokenizer of 300: refused, or given rows."""
    small = write_model(tmp_path / "hf", vocab_size=290)
    refused = tree(tmp_path / "refused", small, chats, layout=TP)
    with pytest.raises((ValueError, RemoteError), match="has 300 ids, but the model's vocab_size is 290"):
        pool.run(finetune, 2, refused)
    config = tree(
        tmp_path / "run", small, chats, layout=TP, finetune={"resize_vocab": True}, train_steps=1,
        optimizer={"type": "SGD", "params": {"lr": 0.0}},
    )  # fmt: skip
    config["hybrid"]["model"] = {**json.loads((small / "config.json").read_text()), "vocab_size": 300}
    pool.run(finetune, 2, config)
    before, after = load_file(small / "model.safetensors"), load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name][:290], before[name])
        torch.testing.assert_close(after[name][290:], before[name].mean(0).repeat(10, 1), rtol=1e-5, atol=1e-6)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["vocab_size"] == 300


def ask(config: dict[str, Any], request: Request) -> dict[str, Any]:
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    return evaluate(resolve_config(config, dist.get_world_size()), request, torch.device("cpu"))


def test_evaluation_of_a_run_with_interleaved_stages(pool: WorkerPool, tmp_path: Path, chats: Path) -> None:
    model = write_model(tmp_path / "hf", num_hidden_layers=4)
    request = Request(loss=True, prompts=("hi",), max_new_tokens=6)
    (want,) = pool.run(ask, 1, tree(tmp_path / "unused", model, chats, layout={}), request)
    interleaved = tree(tmp_path / "unused", model, chats, layout={**PP, "pipeline_schedule": "interleaved"})
    for got in pool.run(ask, 2, interleaved, request):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5) and got["completions"] == want["completions"]


def test_evaluation_agrees_over_layouts(pool: WorkerPool, tmp_path: Path, model: Path, chats: Path) -> None:
    request = Request(loss=True, prompts=("What is 2 plus 2?", "hi"), max_new_tokens=6)
    found = []
    for world, layout in LAYOUTS:
        found += pool.run(ask, world, tree(tmp_path / "unused", model, chats, layout=layout), request)
    for result in found:
        assert result["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
        assert result["tokens"] == found[0]["tokens"] and result["completions"] == found[0]["completions"]
