"""Chat data, a tokenizer and a small pretrained model, made on the fly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid.data.chat.demo import demo_rows
from hybrid.data.chat.tokenizer import TEMPLATES

SPECIAL = ["<|im_start|>", "<|im_end|>"]


def write_chats(path: Path, count: int = 96) -> Path:
    """Sums answered in a fixed JSON form, some of them in two turns."""
    rows = [row.fields["messages"] for row in demo_rows(count)]
    talks = [a + b if index % 3 == 0 else a for index, (a, b) in enumerate(zip(rows, rows[1:] + rows[:1], strict=True))]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def write_tokenizer(folder: Path, vocab_size: int = 300) -> int:
    """A byte-level tokenizer with the ChatML template; the number of its ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [message["content"] for row in demo_rows(64) for message in row.fields["messages"]]
    tokenizer.train_from_iterator([*texts, "user assistant system"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1], "pad_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    (folder / "chat_template.jinja").write_text((TEMPLATES / "chatml.jinja").read_text())
    return int(tokenizer.get_vocab_size())


def write_model(folder: Path, *, vocab_size: int | None = None, **changes: Any) -> Path:
    """A Hugging Face directory with random weights, and the tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = write_tokenizer(folder)
    fields = {
        "vocab_size": size if vocab_size is None else vocab_size, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).save_pretrained(folder)
    return folder


def tree(
    folder: Path,
    model: Path,
    chats: Path,
    *,
    layout: dict[str, Any],
    finetune: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A configuration; `more` goes to the training section, but for `lora`, `optimizer`, `batch` and `micro`."""
    lora, optimizer = more.pop("lora", None), more.pop("optimizer", {"type": "AdamW", "params": {"lr": 1e-2}})
    batch, micro = more.pop("batch", 4), more.pop("micro", 1)
    hybrid = {
        "model": str(model),
        "tokenizer": str(model),
        "init_from": str(model),
        "lora": lora,
        "finetune": finetune or {},
        "data": {
            "source": str(chats), "seq_length": 160, "eval_fraction": 0.1, "cache_dir": str(chats.parent / "cache"),
        },
        "training": {"train_steps": 3, "output_dir": str(folder), "seed": 3, **more},
        **layout,
    }  # fmt: skip
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
        "optimizer": optimizer,
        "hybrid": hybrid,
    }
