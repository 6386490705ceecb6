"""The last transformers of version 4, which reads other fields of config.json, on what is exported."""

import json
import os
import subprocess
import sys

import pytest
import torch
from convert.cases import MODELS, make_source
from convert.downloads import pip

from hybrid.convert.common import Job
from hybrid.convert.hf import write_hf
from hybrid.convert.sources import open_checkpoint

RUN = """
import sys, torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
out = {}
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto").eval()
    dtype, config = model.dtype, model.config
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        logits = model.float()(input_ids=ids).logits
    eps = config.rms_norm_eps
    out[folder] = (logits, dtype, eps, config.rope_theta, config.tie_word_embeddings, config.vocab_size)
torch.save(out, sys.argv[1])
"""


@pytest.mark.timeout(400)
def test_it_computes_what_version_5_computes(tmp_path):
    from transformers import AutoModelForCausalLM

    words = ["--no-deps", "transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2", "--target"]
    packages = pip("transformers-4.57.6", "install", *words)
    folders = {}
    for name in MODELS:
        source = make_source(tmp_path / "source" / name, name)
        write_hf(open_checkpoint(source), Job(output=tmp_path / name), 20000)
        folders[str(tmp_path / name)] = name
    environment = {**os.environ, "PYTHONPATH": str(packages), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", RUN, tmp_path / "logits.pt", *folders]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt")
    for folder in folders:
        logits, dtype, eps, theta, tied, vocab = found[folder]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        assert model.dtype == dtype
        with torch.no_grad():
            wanted = model.float()(input_ids=torch.arange(40).view(2, 20)).logits
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert (eps, theta) == (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"])
        assert (tied, vocab) == (config["tie_word_embeddings"], config["vocab_size"])
