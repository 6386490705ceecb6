"""What one rank knows or fails with, every rank learns."""

import pytest
import torch.distributed as dist

from hybrid.agreement import RemoteError, from_rank_zero, rank_zero_first, rank_zero_only, together


def own_settings():
    return from_rank_zero({"output_dir": f"run-{dist.get_rank()}", "resume": dist.get_rank() == 0})


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rank_zero_decides(pool, world):
    assert pool.run(own_settings, world) == [{"output_dir": "run-0", "resume": True}] * world


def fail_on(bad_rank, call):
    def work():
        if dist.get_rank() == bad_rank:
            raise ValueError(f"bad file on {bad_rank}")
        return dist.get_rank()

    try:
        return {"together": together, "first": rank_zero_first, "only": rank_zero_only}[call](work)
    except (ValueError, RemoteError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("call", "bad_rank"), [("together", 2), ("first", 0), ("first", 2), ("only", 0)])
def test_a_failure_reaches_every_rank(pool, call, bad_rank):
    for rank, outcome in enumerate(pool.run(fail_on, 4, bad_rank, call)):
        mine = f"ValueError: bad file on {bad_rank}"
        assert outcome == (mine if rank == bad_rank else f"RemoteError: rank {bad_rank}: bad file on {bad_rank}")


def fail_everywhere(words):
    try:
        together(lambda: (_ for _ in ()).throw(ValueError(words[dist.get_rank()])))
    except (ValueError, RemoteError) as error:
        return f"{type(error).__name__}: {error}"


def test_the_same_words_are_one_ranks_to_say(pool):
    own, told = "ValueError: ", "RemoteError: rank 0: "
    assert pool.run(fail_everywhere, 4, ["a", "a", "b", "a"]) == [f"{own}a", f"{told}a", f"{own}b", f"{told}a"]
    assert pool.run(fail_everywhere, 1, ["a"]) == [f"{own}a"]


def test_without_failure_everyone_gets_its_result(pool):
    assert pool.run(fail_on, 4, None, "together") == [0, 1, 2, 3]
    assert pool.run(fail_on, 4, None, "first") == [0, 1, 2, 3]
