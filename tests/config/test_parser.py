"""What a command line that is not understood is answered."""

import argparse

import pytest

from hybrid.config.cli import add_arguments
from hybrid.config.parser import ArgumentParser


def parse(*words: str) -> argparse.Namespace:
    parser = ArgumentParser(prog="train.py")
    add_arguments(parser)
    return parser.parse_args(["--ds_config", "z1", *words])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--trian_steps", "5"], "unknown flag --trian_steps: did you mean --train_steps?"),
        (["--train-steps", "5"], "unknown flag --train-steps: did you mean --train_steps?"),
        (["--train_step=5"], "unknown flag --train_step: did you mean --train_steps?"),
        (
            ["--tensor-model-parallel-size", "2"],
            "it is a key of the configuration, --set hybrid.tensor_model_parallel_size=VALUE",
        ),
        (["--zz"], "unknown flag --zz: --help lists them"),
        (["z2"], "unknown argument z2: a value follows its flag"),
    ],
)
def test_unknown_words(capsys: pytest.CaptureFixture[str], words: list[str], answer: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and answer in error and "usage" not in error


def test_the_usual_deepspeed_command_line() -> None:
    args = ArgumentParser()
    add_arguments(args)
    assert args.parse_args(["--deepspeed", "--deepspeed_config", "z1"]).ds_config == "z1"
