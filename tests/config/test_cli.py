"""The arguments of the scripts."""

from __future__ import annotations

import argparse

import pytest

from hybrid.config.cli import add_arguments, run_config_from_args
from hybrid.config.errors import ConfigError
from hybrid.config.run import RunConfig


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def run(*arguments: str, world_size: int | None = 1) -> RunConfig:
    return run_config_from_args(parse("--ds_config", "z2", *arguments), world_size)


def test_flags_and_overrides() -> None:
    config = run("--train_steps", "3", "--seq_length=64", "--set", "bf16.enabled=false", "--set", "hybrid.tokenizer=t")
    assert (config.hybrid.training.train_steps, config.hybrid.data.seq_length) == (3, 64)
    assert (config.precision, config.hybrid.tokenizer) == ("fp32", "t")


@pytest.mark.parametrize("flag", ["--ds_config", "--deepspeed_config"])
def test_both_names_of_the_file(flag: str) -> None:
    assert parse(flag, "z1").ds_config == "z1"


@pytest.mark.parametrize("inserted", [["--local_rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]])
def test_what_launchers_insert_is_swallowed(inserted: list[str]) -> None:
    assert parse(*inserted, "--ds_config", "z2").ds_config == "z2"


def test_one_or_more_sources() -> None:
    assert run("--data", "a.jsonl").hybrid.data.source == "a.jsonl"
    assert run("--data", "0.3", "a.jsonl", "0.7", "b.jsonl").hybrid.data.source == ["0.3", "a.jsonl", "0.7", "b.jsonl"]


def test_resume_with_and_without_a_value() -> None:
    assert run().hybrid.training.resume == "auto"
    assert run("--resume").hybrid.training.resume == "latest"
    assert run("--resume", "folder").hybrid.training.resume == "folder"


def test_a_dry_run_plans_for_any_number_of_ranks() -> None:
    assert run("--dry_run", world_size=None).parallel.world_size == 1
    assert run("--dry_run", "--world_size", "4", world_size=1).parallel.world_size == 4
    with pytest.raises(ConfigError, match="only goes with --dry_run"):
        run("--world_size", "8")
    with pytest.raises(ConfigError, match="at least 1"):
        run("--dry_run", "--world_size", "0")


def test_help_names_the_shipped_configs_and_the_paths(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "z2_tp2" in text and "hybrid.training.train_steps" in text and "local_rank" not in text


def test_checkpoint_flags() -> None:
    got = run("--save_every", "5", "--keep_last", "2", "--keep_every", "100", "--max_wall_time", "1:00:00").hybrid
    assert (got.training.save_every, got.training.max_wall_time) == (5, 3600.0)
    assert (got.checkpoint.keep_last, got.checkpoint.keep_every, got.checkpoint.asynchronous) == (2, 100, True)
    stopped = run("--stop_after_steps", "3", "--set", "hybrid.checkpoint.async=false").hybrid
    assert stopped.training.stop_after_steps == 3 and not stopped.checkpoint.asynchronous
