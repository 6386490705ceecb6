"""Five families of templates, written from their public definitions, against expectations made by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hybrid.data.chat.formats import Conversation
from hybrid.data.chat.masks import ChatEncoder, Encoded
from hybrid.data.chat.tokenizer import ChatTokenizer, load_chat_tokenizer, template_names

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = [{"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "It is four."}]
SECOND = [{"role": "user", "content": "And you?"}, {"role": "assistant", "content": "Fine."}]

FAMILIES: dict[str, Any] = {
    "llama2": {"special": ["<s>", "</s>"], "style": "words", "bos": "<s>", "eos": "</s>"},
    "llama3": {
        "special": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "bos": "<|begin_of_text|>",
        "eos": "<|eot_id|>",
    },
    "chatml": {"special": ["<|im_start|>", "<|im_end|>"], "eos": "<|im_end|>"},
    "mistral": {"special": ["<s>", "</s>", "[INST]", "[/INST]"], "style": "words", "bos": "<s>", "eos": "</s>"},
    "zephyr": {"special": ["<s>", "</s>"], "style": "words", "bos": "<s>", "eos": "</s>", "pad": "</s>"},
}

_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
EXPECTED: dict[str, list[str]] = {
    # Not learnt and learnt text in turn.
    "llama2": [
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is two plus two? [/INST]", " It is four. </s>",
        "<s>[INST] And you? [/INST]", " Fine. </s>",
    ],
    "llama3": [
        "<|begin_of_text|>" + _HEADER.format("system") + "Be brief.<|eot_id|>" + _HEADER.format("user")
        + "What is two plus two?<|eot_id|>" + _HEADER.format("assistant"), "It is four.<|eot_id|>",
        _HEADER.format("user") + "And you?<|eot_id|>" + _HEADER.format("assistant"), "Fine.<|eot_id|>",
    ],
    "chatml": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is two plus two?<|im_end|>\n"
        "<|im_start|>assistant\n", "It is four.<|im_end|>",
        "\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n", "Fine.<|im_end|>", "\n",
    ],
    "mistral": [
        "<s>[INST] What is two plus two? [/INST]", "It is four.</s>", "[INST] And you? [/INST]", "Fine.</s>",
    ],
    # The tokenizer writes a BOS, the template does not.
    "zephyr": [
        "<s><|system|>\nBe brief.</s>\n<|user|>\nWhat is two plus two?</s>\n<|assistant|>\n", "It is four.</s>",
        "\n<|user|>\nAnd you?</s>\n<|assistant|>\n", "Fine.</s>", "\n",
    ],
}  # fmt: skip


def talk(*messages: dict[str, Any], **more: Any) -> Conversation:
    return Conversation(messages=messages, **more)


def parts(encoded: Encoded, tokenizer: ChatTokenizer) -> list[tuple[bool, list[int]]]:
    pairs = zip(encoded.supervised, encoded.ids, strict=True)
    return [(flag, [token for _, token in run]) for flag, run in groupby(pairs, key=lambda pair: pair[0])]


def tokens_of(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    """The exact text of tokens, spaces and all."""
    text = "".join(tokenizer.backend.id_to_token(token) for token in ids)
    if tokenizer.backend.normalizer is None:  # byte level
        return text.replace("\u0120", " ").replace("\u010a", "\n")
    return text.replace("\u2581", " ").replace("<0x0A>", "\n")


def spaceless(text: str) -> str:
    # A tokenizer of the older kind puts a word mark where a special token ends.
    return text.replace(" ", "")


def family(name: str, tokenizer_folder: Callable[..., Path]) -> ChatTokenizer:
    folder = tokenizer_folder(**FAMILIES[name])
    return load_chat_tokenizer(folder, folder, name)


def messages_of(name: str) -> list[dict[str, Any]]:
    return [*([] if name == "mistral" else [SYSTEM]), *FIRST, *SECOND]


def test_the_families_are_those_shipped() -> None:
    assert sorted(FAMILIES) == template_names()


@pytest.mark.parametrize("name", FAMILIES)
def test_all_turns_are_learnt_with_their_end_tokens(name: str, tokenizer_folder: Callable[..., Path]) -> None:
    tokenizer = family(name, tokenizer_folder)
    encoded = ChatEncoder(tokenizer).encode(talk(*messages_of(name)), "here")
    found = parts(encoded, tokenizer)
    expected = EXPECTED[name]
    assert [flag for flag, _ in found] == [index % 2 == 1 for index in range(len(expected))]
    for (_, ids), text in zip(found, expected, strict=True):
        assert spaceless(tokens_of(tokenizer, ids)) == spaceless(text)
    end = tokenizer.backend.token_to_id(FAMILIES[name]["eos"])
    assert [ids[-1] for flag, ids in found if flag] == [end, end] == encoded.ends
    assert encoded.merged == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_are_those_of_apply_chat_template(name: str, tokenizer_folder: Callable[..., Path]) -> None:
    tokenizer = family(name, tokenizer_folder)
    messages = messages_of(name)
    encoded = ChatEncoder(tokenizer).encode(talk(*messages), "here")
    theirs = tokenizer.renderer.apply_chat_template(messages, chat_template=tokenizer.template, return_dict=True)
    ids = list(theirs["input_ids"])
    assert encoded.ids == (ids if name != "zephyr" else [tokenizer.bos_id, *ids])
    if name != "llama2":  # which begins each turn of the user with one
        assert encoded.ids.count(tokenizer.bos_id) == (tokenizer.bos_id is not None)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_learnt_is_the_prompt_of_inference(name: str, tokenizer_folder: Callable[..., Path]) -> None:
    """Token by token: up to a turn the sample is what a server would feed the model to get that turn."""
    tokenizer = family(name, tokenizer_folder)
    messages = messages_of(name)
    encoded = ChatEncoder(tokenizer, "last").encode(talk(*messages), "here")
    prompt = tokenizer.renderer.apply_chat_template(
        messages[:-1], chat_template=tokenizer.template, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    if name == "zephyr":
        prompt = [tokenizer.bos_id, *prompt]
    assert encoded.ids[: len(prompt)] == list(prompt)
    assert not any(encoded.supervised[: len(prompt)]) and encoded.supervised[len(prompt)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_turn_only(name: str, tokenizer_folder: Callable[..., Path]) -> None:
    tokenizer = family(name, tokenizer_folder)
    every = ChatEncoder(tokenizer).encode(talk(*messages_of(name)), "here")
    last = ChatEncoder(tokenizer, "last").encode(talk(*messages_of(name)), "here")
    assert last.ids == every.ids
    (learnt,) = [ids for flag, ids in parts(last, tokenizer) if flag]
    assert learnt == [ids for flag, ids in parts(every, tokenizer) if flag][-1]


MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m['content'] }}"
    "END{% endgeneration %}REST{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("end", "rest"), [("<|im_end|>", ""), ("", "<|im_end|>"), ("<|im_end|>\n", "")])
def test_generation_marks_give_the_same_mask(tokenizer_folder: Callable[..., Path], end: str, rest: str) -> None:
    """Whether or not they include the end token or the line break behind it."""
    folder = tokenizer_folder(**FAMILIES["chatml"])
    rest += "{{ '\\n' }}" if "\n" not in end else ""
    (folder / "chat_template.jinja").write_text(MARKED.replace("END", end).replace("REST", rest))
    marked, derived = load_chat_tokenizer(folder, folder), load_chat_tokenizer(folder, folder, "chatml")
    conversation = talk(*messages_of("chatml"))
    assert ChatEncoder(marked).method == "the template's generation marks"
    assert ChatEncoder(marked).encode(conversation, "x") == ChatEncoder(derived).encode(conversation, "x")
    with_empty = talk(*FIRST, {"role": "user", "content": "x"}, {"role": "assistant", "content": ""}, *SECOND)
    assert ChatEncoder(marked).encode(with_empty, "x") == ChatEncoder(derived).encode(with_empty, "x")


def chatml(tokenizer_folder: Callable[..., Path]) -> ChatEncoder:
    return ChatEncoder(family("chatml", tokenizer_folder))


@pytest.mark.parametrize(
    "messages",
    [[], [SYSTEM], [FIRST[0]], [SYSTEM, FIRST[0]], [FIRST[0], {"role": "assistant", "content": " \n"}],
     [FIRST[0], {"role": "assistant", "content": "x", "weight": 0}]],
    ids=["nothing", "system", "user", "system and user", "empty assistant", "weight 0"],
)  # fmt: skip
def test_no_target(tokenizer_folder: Callable[..., Path], messages: list[dict[str, Any]]) -> None:
    assert not chatml(tokenizer_folder).encode(talk(*messages), "here").has_target


def test_what_follows_the_last_answer_is_left_out(tokenizer_folder: Callable[..., Path]) -> None:
    encoder = chatml(tokenizer_folder)
    assert encoder.encode(talk(*FIRST, SECOND[0]), "here") == encoder.encode(talk(*FIRST), "here")


def test_two_users_in_a_row(tokenizer_folder: Callable[..., Path]) -> None:
    """ChatML takes them; Llama 2 refuses them, and the error names the row."""
    doubled = talk(FIRST[0], *FIRST)
    encoder = chatml(tokenizer_folder)
    assert sum(encoder.encode(doubled, "here").supervised) == sum(encoder.encode(talk(*FIRST), "here").supervised)
    strict = ChatEncoder(family("llama2", tokenizer_folder))
    with pytest.raises(
        ValueError, match=r"data.jsonl:7: the chat template refuses .*\(user user assistant\).*alternate"
    ):
        strict.encode(doubled, "data.jsonl:7")


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer_folder: Callable[..., Path]) -> None:
    """As one that strips the reasoning of all answers but the last: nothing is guessed."""
    folder = tokenizer_folder(**FAMILIES["chatml"])
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' and not loop.last %}"
        "{{ m['content'][3:] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = load_chat_tokenizer(folder, folder)
    with pytest.raises(ValueError, match="row 3: the text of message 2 cannot be told from the rest"):
        ChatEncoder(tokenizer).encode(talk(*FIRST, *SECOND), "row 3")
    last = ChatEncoder(tokenizer, "last").encode(talk(*FIRST, *SECOND), "row 3")
    assert tokens_of(tokenizer, [t for f, ids in parts(last, tokenizer) if f for t in ids]) == "Fine.<|im_end|>"


@pytest.mark.parametrize("name", ["chatml", "zephyr"])
def test_no_token_holds_both_prompt_and_answer(name: str, tokenizer_folder: Callable[..., Path]) -> None:
    """The prompt ends with a space, which a tokenizer likes to put into the next word.

    Cut there, the prompt is what inference feeds; where a cut would add a word mark, the space goes with the answer.
    """
    folder = tokenizer_folder(**FAMILIES[name])
    eos = FAMILIES[name]["eos"]
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = load_chat_tokenizer(folder, folder)
    encoded = ChatEncoder(tokenizer).encode(talk(*SECOND), "x")
    text = tokens_of(tokenizer, [t for f, ids in parts(encoded, tokenizer) if f for t in ids])
    if name == "chatml":
        prompt = tokenizer.renderer.apply_chat_template(SECOND[:1], add_generation_prompt=True, return_dict=True)
        assert text == "Fine." + eos and encoded.merged == 0
        assert encoded.ids[: len(prompt["input_ids"])] == prompt["input_ids"]
    else:
        assert text == " Fine." + eos and encoded.merged == 0
        (folder / "chat_template.jinja").write_text(str(tokenizer.template).replace(": ", ": F"))
        joined = ChatEncoder(load_chat_tokenizer(folder, folder))
        answer = {"role": "assistant", "content": "ine. Fine."}
        assert joined.encode(talk(SECOND[0], answer), "x").merged == 1


@pytest.mark.parametrize("doubled", [False, True])
def test_one_bos_whether_the_template_writes_it_or_not(tokenizer_folder: Callable[..., Path], doubled: bool) -> None:
    folder = tokenizer_folder(**FAMILIES["zephyr"])
    tokenizer = load_chat_tokenizer(folder, folder, "zephyr")
    written = "{{ bos_token }}" * (2 if doubled else 1) + str(tokenizer.template)
    (folder / "chat_template.jinja").write_text(written)
    with_bos = load_chat_tokenizer(folder, folder)
    assert ChatEncoder(with_bos).encode(talk(*FIRST), "x") == ChatEncoder(tokenizer).encode(talk(*FIRST), "x")


def test_a_prompt_and_its_completion_as_they_are(tokenizer_folder: Callable[..., Path]) -> None:
    folder = tokenizer_folder(**FAMILIES["zephyr"])
    tokenizer = load_chat_tokenizer(folder, folder)
    assert tokenizer.template is None
    conversation = talk(*FIRST, plain=("What is two plus two?", " It is four."))
    encoded = ChatEncoder(tokenizer).encode(conversation, "x")
    learnt = [ids for flag, ids in parts(encoded, tokenizer) if flag]
    assert [tokens_of(tokenizer, ids) for ids in learnt] == [" It is four.</s>"]
    assert encoded.ids[0] == tokenizer.bos_id and encoded.ids.count(tokenizer.bos_id) == 1
    with pytest.raises(ValueError, match="row 1: .* has no chat template"):
        ChatEncoder(tokenizer).encode(talk(*FIRST), "row 1")
    assert not ChatEncoder(tokenizer).encode(talk(*FIRST, plain=("x", "  ")), "x").has_target


def test_tool_calls_and_tools_reach_the_template(tokenizer_folder: Callable[..., Path]) -> None:
    folder = tokenizer_folder(**FAMILIES["chatml"])
    (folder / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools | length }} tools\n{% endif %}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "A:{{ m['content'] }}{% for c in m.tool_calls or [] %}call {{ c['name'] }}{% endfor %}<|im_end|>\n{% else %}"
        "{{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    tokenizer = load_chat_tokenizer(folder, folder)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    encoded = ChatEncoder(tokenizer).encode(talk(FIRST[0], call, tools=[{"name": "add"}]), "x")
    assert tokens_of(tokenizer, encoded.ids).startswith("1 tools\n")
    assert [tokens_of(tokenizer, ids) for f, ids in parts(encoded, tokenizer) if f] == ["call add<|im_end|>"]
