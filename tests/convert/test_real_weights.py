"""SmolLM2-135M (Apache-2.0; 9 heads, 3 key/value heads, tied), its weights from a package of the index."""

import pytest
from convert.cases import assert_same, read_folder
from convert.live import live_logits
from support.smollm2 import write_smollm2

from hybrid.convert.cli import main
from hybrid.convert.logits import our_logits, reference_logits, sample_tokens
from hybrid.convert.sources import open_checkpoint

pytestmark = [pytest.mark.real_weights, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The model in several files, and its fp32 logits on 16 tokens."""
    source = write_smollm2(tmp_path_factory.mktemp("smollm2"), max_shard_size="100MB")
    ids = sample_tokens(open_checkpoint(source).config(), 16)
    return source, ids, reference_logits(source, ids)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (3, 1), (3, 2)])
def test_there_and_back(tmp_path, pool, smollm2, tp, pp):
    source, ids, wanted = smollm2
    sharded, back = tmp_path / "sharded", tmp_path / "back"
    layout = ["--tp", str(tp), "--pp", str(pp)]
    assert main(["to-sharded", "--hf", str(source), "--output", str(sharded), *layout]) == 0
    if tp * pp <= pool.size:
        config = open_checkpoint(sharded).config()
        found = pool.run(live_logits, tp * pp, config, tp, pp, str(sharded), ids, timeout=200)[-1]
    else:
        found = our_logits(open_checkpoint(sharded), ids)
    # fp32 sums of other orders through 30 layers.
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert main(["to-hf", "--checkpoint", str(sharded), "--output", str(back), "--max_shard_size", "100MB"]) == 0
    assert_same(read_folder(back), read_folder(source))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()


def test_a_size_that_does_not_divide_it(tmp_path, capsys, smollm2):
    assert main(["to-sharded", "--hf", str(smollm2[0]), "--output", str(tmp_path / "x"), "--tp", "2"]) == 2
    message = capsys.readouterr().err
    assert "num_attention_heads 9 is not divisible by tensor_model_parallel_size 2" in message
    assert "valid tensor_model_parallel_size values for this model are 1, 3\n" in message
    assert not (tmp_path / "x").exists()
