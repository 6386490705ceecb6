"""SmolLM2-135M (Apache-2.0; 9 heads, 3 key/value heads, tied), its weights from a package of the index."""

import pytest
from convert.cases import assert_same, read_folder
from convert.live import live_logits

from hybrid.convert.cli import main
from hybrid.convert.logits import our_logits, reference_logits, sample_tokens
from hybrid.convert.sources import open_checkpoint

pytestmark = [pytest.mark.real_weights, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def logits(smollm2):
    """16 tokens and their fp32 logits."""
    ids = sample_tokens(open_checkpoint(smollm2).config(), 16)
    return ids, reference_logits(smollm2, ids)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (3, 1), (3, 2)])
def test_there_and_back(tmp_path, pool, smollm2, logits, tp, pp):
    ids, wanted = logits
    sharded, back = tmp_path / "sharded", tmp_path / "back"
    layout = ["--tp", str(tp), "--pp", str(pp)]
    assert main(["to-sharded", "--hf", str(smollm2), "--output", str(sharded), *layout]) == 0
    if tp * pp <= pool.size:
        config = open_checkpoint(sharded).config()
        found = pool.run(live_logits, tp * pp, config, tp, pp, str(sharded), ids, timeout=200)[-1]
    else:
        found = our_logits(open_checkpoint(sharded), ids)
    # fp32 sums of other orders through 30 layers.
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert main(["to-hf", "--checkpoint", str(sharded), "--output", str(back), "--max_shard_size", "100MB"]) == 0
    assert_same(read_folder(back), read_folder(smollm2))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (smollm2 / name).read_bytes()


def test_a_size_that_does_not_divide_it(tmp_path, capsys, smollm2):
    assert main(["to-sharded", "--hf", str(smollm2), "--output", str(tmp_path / "x"), "--tp", "2"]) == 2
    message = capsys.readouterr().err
    assert "num_attention_heads 9 is not divisible by tensor_model_parallel_size 2" in message
    assert "valid tensor_model_parallel_size values for this model are 1, 3\n" in message
    assert not (tmp_path / "x").exists()
