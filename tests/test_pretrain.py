"""The main job from the command line, as a user starts it."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tokens_per_second_per_device",
    "tflops_per_device", "mfu", "step_time", "peak_memory_bytes", "skipped",
}  # fmt: skip


def start(*command, cwd=ROOT, timeout=300, **environment):
    """Run a command the way a shell would; its exit code and what it printed."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", **environment}
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, timeout=timeout, text=True, capture_output=True)
    return done.returncode, done.stdout + done.stderr


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """The literal command's run: its folder, output and seconds."""
    folder = tmp_path_factory.mktemp("run")
    began = time.monotonic()
    code, output = start(
        "deepspeed", "launch/pretrain.py", "--ds_config", "ds_configs/z2_tp2.json", "--output_dir", folder
    )
    assert code == 0, output
    return folder, output, time.monotonic() - began


@pytest.mark.timeout(360)
def test_the_demo_learns(demo_run):
    folder, output, _ = demo_run
    assert "starting 2 ranks" in output
    vocab = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    evaluations = read_lines(folder / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [25, 50, 75, 100]
    assert evaluations[-1]["eval_loss"] < math.log(vocab) - 1.5


def test_the_metrics_are_complete(demo_run):
    folder, _, _ = demo_run
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 101))
    assert all(set(line) == KEYS for line in lines)
    assert all(line["tokens"] == 2048 and line["mfu"] is None and not line["skipped"] for line in lines)
    assert all(line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / 2) for line in lines)
    config = json.loads((folder / "config.json").read_text())
    assert config["gradient_accumulation_steps"] == 4 and config["hybrid"]["tensor_model_parallel_size"] == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["step"], summary["loss"]) == (100, lines[-1]["loss"])
    assert (summary["eval_step"], summary["eval_loss"]) == (
        100,
        read_lines(folder / "evaluations.jsonl")[-1]["eval_loss"],
    )
    assert summary["memory_bytes"]["parameters"] > 0
    assert {"all_gather", "reduce_scatter"} <= set(summary["traffic_of_one_step"]["tensor"])


def test_the_saved_model_is_the_trained_one(demo_run):
    """transformers loads the directory and finds the run's own evaluation loss in it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hybrid.data.build import build_data
    from hybrid.data.loader import EvalLoader
    from hybrid.data.spec import DataSpec

    folder, _, _ = demo_run
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.dtype == torch.bfloat16 and len(tokenizer) == model.config.vocab_size
    config = json.loads((folder / "config.json").read_text())["hybrid"]
    spec = DataSpec(
        source="demo",
        tokenizer=None,
        seq_length=config["data"]["seq_length"],
        vocab_size=model.config.vocab_size,
        seed=config["training"]["seed"],
        eval_fraction=config["data"]["eval_fraction"],
    )
    data = build_data(spec)
    total, tokens = 0.0, 0
    model = model.float()
    for ids, labels in EvalLoader(data.eval, micro_batch_size=4, dp_rank=0, dp_size=1):
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        tokens += int((labels != -100).sum())
    last = read_lines(folder / "evaluations.jsonl")[-1]
    assert tokens == last["eval_tokens"]
    assert total / tokens == pytest.approx(last["eval_loss"], abs=5e-3)  # bf16 activations in the run, fp32 here


def short(folder, *extra):
    return ["--output_dir", folder, "--train_steps", "2", "--seq_length", "32", "--set", "bf16.enabled=false", *extra]


@pytest.mark.parametrize(
    "launcher",
    [
        ["deepspeed", "--num_gpus", "2", "launch/pretrain.py"],
        ["torchrun", "--nproc_per_node", "2", "launch/pretrain.py"],
        ["accelerate", "launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
         "--dynamo_backend", "no", "launch/pretrain.py"],
    ],
    ids=["deepspeed", "torchrun", "accelerate"],
)  # fmt: skip
def test_every_launcher(tmp_path, launcher):
    """The other tests start with python, and let the package start the ranks."""
    code, output = start(*launcher, "--ds_config", "z2_tp2", *short(tmp_path / "run"))
    assert code == 0, output
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)


def test_layouts_and_launches_agree_on_the_loss(tmp_path):
    """The same run as one process, as TP 2 + SP and as PP 2."""
    seen = {}
    layouts = {
        "one": ["hybrid.tensor_model_parallel_size=1", "hybrid.sequence_parallel=false"],
        "tp": [],
        "pp": ["hybrid.tensor_model_parallel_size=1", "hybrid.pipeline_model_parallel_size=2",
               "hybrid.sequence_parallel=false"],
    }  # fmt: skip
    for name, settings in layouts.items():
        extra = [word for setting in settings for word in ("--set", setting)]
        code, output = start("python", "launch/pretrain.py", "--ds_config", "z2_tp2", *short(tmp_path / name, *extra))
        assert code == 0, output
        seen[name] = [line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")]
    assert seen["tp"] == pytest.approx(seen["one"], rel=1e-5) and seen["pp"] == pytest.approx(seen["one"], rel=1e-5)


def test_fp16_with_a_monitor_and_deepspeeds_schedule(tmp_path):
    """What only the configuration file switches on, on a CPU for which DeepSpeed itself refuses fp16."""
    extra = {
        "fp16": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2}},
        "hybrid.training.lr_schedule": None,
    }
    words = [word for path, value in extra.items() for word in ("--set", f"{path}={json.dumps(value)}")]
    code, output = start("python", "launch/pretrain.py", "--ds_config", "z2_tp2", *short(tmp_path / "run", *words))
    assert code == 0, output
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped"] for line in lines] == [False, False] and all(line["loss"] < 8 for line in lines)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == "float16"
    logged = (tmp_path / "csv" / "Train_Samples_train_loss.csv").read_text().split()[1:]
    assert [float(row.split(",")[1]) for row in logged] == pytest.approx([line["loss"] for line in lines], rel=1e-5)


def test_the_batch_grows(tmp_path):
    """4, then 8, 12 and 16 samples; the loss is still that of the samples, whatever the layout."""
    losses = {}
    for pipe in (1, 2):
        settings = {
            "hybrid.tensor_model_parallel_size": 1,
            "hybrid.sequence_parallel": "false",
            "hybrid.pipeline_model_parallel_size": pipe,
            "train_micro_batch_size_per_gpu": 4 // pipe,
            "hybrid.training.batch_rampup": '{"start": 4, "increment": 4, "samples": 24}',
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        run = tmp_path / str(pipe)
        code, output = start(
            "python", "launch/pretrain.py", "--ds_config", "z2_tp2", *short(run, *words, "--train_steps", "5")
        )
        assert code == 0, output
        lines = read_lines(run / "metrics.jsonl")
        assert [line["tokens"] // 32 for line in lines] == [4, 4, 8, 12, 16]
        losses[pipe] = [line["loss"] for line in lines]
    assert losses[1] == pytest.approx(losses[2], rel=1e-4)


def test_wrong_settings_are_refused_before_any_work(tmp_path):
    began = time.monotonic()
    code, output = start(
        "python", "launch/pretrain.py", "--ds_config", "z2_tp2", "--output_dir", tmp_path / "run",
        "--set", "hybrid.tensor_model_parallel_size=3", "--seq_length", "127",
    )  # fmt: skip
    assert code == 2 and not (tmp_path / "run").exists()
    assert "num_attention_heads" in output and "127" in output and "Traceback" not in output
    assert time.monotonic() - began < 10


def test_dry_run_prints_the_rank_map():
    code, output = start("python", "launch/pretrain.py", "--ds_config", "llama3_70b_tp8_pp8", "--dry_run")
    assert code == 0 and "vocabulary" in output.lower() and "128256" in output
    assert "memory planned" in output and "GiB on stage 0" in output


@pytest.mark.parametrize("flag", ["--data", "--init_from", "--output_dir", "--resume"])
def test_a_folder_that_is_not_there_ends_every_rank_with_its_name(tmp_path, flag):
    """One message, no traceback, whichever rank finds it."""
    (tmp_path / "file").touch()
    missing = tmp_path / "file" / "below"
    code, output = start(
        "python", "launch/pretrain.py", "--ds_config", "z2_tp2", *short(tmp_path / "run"), flag, missing
    )
    assert code == 2, output
    assert output.count(str(missing)) >= 1 and "Traceback" not in output
