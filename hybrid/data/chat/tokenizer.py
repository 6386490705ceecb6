"""A tokenizer with its chat template, and what has to be known of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hybrid.data.cache import fingerprint
from hybrid.data.tokenizer import DEMO, TextTokenizer, load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
PLAIN = "none"
"""The name of no template: prompt and answer follow each other as they are."""
_DEMO_TEMPLATE = "zephyr"
_TEMPLATE_FILE = "chat_template.jinja"


def template_names() -> list[str]:
    """The templates that come with the package."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


@dataclass(frozen=True, kw_only=True)
class ChatTokenizer(TextTokenizer):
    """A fast tokenizer that renders conversations."""

    renderer: Any
    """transformers' tokenizer."""
    template: str | None
    """The Jinja template; None renders prompt and answer as they are."""
    template_name: str
    """For people: `the tokenizer's own`, a name, or a file."""
    bos_id: int | None
    """The token it begins a text with, None if it does not."""

    @cached_property
    def splitter(self) -> Tokenizer:
        """The tokenizer without the post-processor, which shortens offsets by spaces and adds tokens."""
        splitter = Tokenizer.from_str(self.backend.to_str())
        splitter.post_processor = None
        return splitter

    @property
    def behaviour(self) -> str:
        return fingerprint(super().behaviour, self.template, self.bos_id, self.renderer.special_tokens_map)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into `folder`, the template with them."""
        super().save(folder)
        if self.template is not None:
            (Path(folder) / _TEMPLATE_FILE).write_text(self.template, encoding="utf-8")


def load_chat_tokenizer(
    name_or_folder: str | Path, cache_dir: str | Path, chat_template: str | None = None
) -> ChatTokenizer:
    """The tokenizer `demo`, of a folder, or of a Hugging Face name.

    Args:
        chat_template: None for the tokenizer's own (if it has one), `none`, one of `template_names`, or a file.

    Raises:
        ValueError: there is no such tokenizer or template.
    """
    text = load_tokenizer(name_or_folder, cache_dir)
    renderer = _renderer(text)
    if chat_template is None and text.name == DEMO:
        chat_template = _DEMO_TEMPLATE
    template, template_name = _template(renderer, chat_template)
    return ChatTokenizer(
        backend=text.backend,
        name=text.name,
        folder=text.folder,
        eos_id=text.eos_id,
        pad_id=text.pad_id,
        renderer=renderer,
        template=template,
        template_name=template_name,
        bos_id=_leading_bos(renderer),
    )


def _renderer(text: TextTokenizer) -> Any:
    # Costs seconds, which pretraining does not pay.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(text.folder or text.name, use_fast=True)


def _leading_bos(renderer: Any) -> int | None:
    """The BOS token if the tokenizer puts it before a text on its own."""
    bos: int | None = renderer.bos_token_id
    return bos if bos is not None and renderer("a")["input_ids"][:1] == [bos] else None


def _template(renderer: Any, chosen: str | None) -> tuple[str | None, str]:
    if chosen == PLAIN:
        return None, "none: prompt and answer as they are"
    if chosen is None:
        own = renderer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        return own, "the tokenizer's own" if own else "none: the tokenizer has no template"
    path = TEMPLATES / f"{chosen}.jinja" if chosen in template_names() else Path(chosen)
    try:
        return path.read_text(encoding="utf-8"), chosen
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join([PLAIN, *template_names()])
        raise ValueError(f"chat_template {chosen!r} is neither one of {names} nor a file: {error}") from error
