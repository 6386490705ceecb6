"""Weights into a running model at every layout, and the logits it computes with them."""

import functools
import logging

import pytest
import torch
from convert.cases import BASE, MODELS, make_source, model_config, random_tensors, read_folder, write_hf_folder
from convert.live import build, live_logits
from support.llama import small_config

from hybrid.config.errors import ConfigError
from hybrid.convert import store
from hybrid.convert.common import Job
from hybrid.convert.load import load_weights
from hybrid.convert.native import write_native
from hybrid.convert.sharded import plan_layout, write_sharded
from hybrid.convert.sources import open_checkpoint
from hybrid.tensor_parallel.params import named_segments

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


@functools.cache
def tokens(vocab):
    return torch.randint(0, vocab, (2, 12), generator=torch.Generator().manual_seed(1))


def reference_logits(folder, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_at_every_layout(tmp_path, pool, name):
    config, source = model_config(name), make_source(tmp_path / "hf", name)
    ids = tokens(config.vocab_size)
    wanted = reference_logits(source, ids)
    checkpoint = open_checkpoint(source)
    write_sharded(checkpoint, plan_layout(config, 2, 2), Job(output=tmp_path / "sharded"))
    for tp, pp in LAYOUTS:
        folder = source if (tp, pp) == (1, 1) else tmp_path / "sharded"
        for found in pool.run(live_logits, tp * pp, config, tp, pp, str(folder), ids)[-tp:]:
            # Sums of other orders in fp32, of logits of order 1.
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def loaded(config, tp, pp, source, dtype):
    """This rank's (name, source slice, values) after loading."""
    module, _ = build(config, tp, pp, dtype)
    load_weights(module, config, source)
    return [
        (segment.hf_name, segment.source, param.detach()[segment.local].clone())
        for param, segment in named_segments(module)
    ]


def assert_loaded(results, wanted):
    for name, index, values in (part for result in results for part in result):
        assert torch.equal(values, wanted[name][index]), name


def test_every_format(tmp_path, pool):
    config, source = model_config("extended"), make_source(tmp_path / "hf", "extended")
    wanted = read_folder(source)
    checkpoint = open_checkpoint(source)
    write_sharded(checkpoint, plan_layout(config, 4, 2), Job(output=tmp_path / "sharded"))
    write_native(checkpoint, plan_layout(config, 4, 1), Job(output=tmp_path / "native"))
    torch.save(wanted, tmp_path / "pytorch_model.bin")
    for folder in (source, tmp_path / "sharded", tmp_path / "native", tmp_path):
        assert_loaded(pool.run(loaded, 4, config, 2, 2, str(folder), torch.float16), wanted)


def bytes_read(config, tp, source):
    """Bytes read by this rank, and the names of the files it opened."""
    counts, files = [0], set()
    copy = store.FilePiece.copy

    def counting(self, index, out):
        counts[0] += out.nbytes
        files.add(self.file.path.name)
        copy(self, index, out)

    module, _ = build(config, tp, 1, torch.bfloat16)
    store.FilePiece.copy = counting
    try:
        load_weights(module, config, source)
    finally:
        store.FilePiece.copy = copy
    return counts[0], sorted(files)


def test_each_rank_reads_what_it_holds(tmp_path, pool):
    config, source = model_config("llama3"), make_source(tmp_path / "hf", "llama3")
    checkpoint = open_checkpoint(source)
    total = sum(tensor.nbytes for tensor in checkpoint.store.tensors.values())
    write_sharded(checkpoint, plan_layout(config, 4, 1), Job(output=tmp_path / "sharded"))
    for folder in (source, tmp_path / "sharded"):
        for rank, (count, files) in enumerate(pool.run(bytes_read, 4, config, 4, str(folder))):
            assert count <= 0.26 * total
            if folder != source:
                # Its own, and the first rank's for the norms.
                own = f"model-pp00-tp{rank:02d}.safetensors"
                assert files == sorted({own, "model-pp00-tp00.safetensors"})


def refused(config, source):
    module, _ = build(config, 2, 1)
    before = [param.clone() for param in module.parameters()]
    with pytest.raises(ConfigError) as caught:
        load_weights(module, config, source)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    return str(caught.value)


def test_another_model_is_refused_by_all_ranks_alike(tmp_path, pool):
    source = make_source(tmp_path / "hf", "llama2")
    for name, message in (("biases", "missing: model.layers.0.mlp.down_proj.bias"), ("mqa", "has shape [16, 32]")):
        first, second = pool.run(refused, 2, model_config(name), str(source))
        assert first == second and message in first


def test_a_tied_head_that_is_no_copy(tmp_path, pool):
    config = model_config("llama3.2")
    tensors = random_tensors(config, torch.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    source = write_hf_folder(tmp_path / "hf", tensors, config.to_hf("bf16"))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        pool.run(loaded, 1, config, 1, 1, str(source), torch.bfloat16)


def test_a_model_that_computes_otherwise_is_said(tmp_path, pool):
    source = make_source(tmp_path / "hf", "llama2")
    config = small_config(**BASE, rope_theta=1e6, rms_norm_eps=1e-2)
    messages = pool.run(warnings_of, 1, config, str(source))[0]
    assert len(messages) == 1 and "rope" in messages[0] and "10000" in messages[0]


def warnings_of(config, source):
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hybrid.convert.load")
    logger.addHandler(handler)
    try:
        module, _ = build(config, 1, 1)
        load_weights(module, config, source)
    finally:
        logger.removeHandler(handler)
    return messages
