"""The shapes in which conversations are published, brought to one: messages with roles."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hybrid.data.documents import checked_text, json_type

Format = Literal["messages", "prompt_completion", "alpaca", "sharegpt"]
"""messages: OpenAI's and Hugging Face's; sharegpt: `conversations` with `from` and `value`."""

Message = Mapping[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}

_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row, whatever its format was."""

    messages: tuple[Message, ...]
    """Each with `role` and `content`, and whatever else the template may want to see."""
    tools: list[Any] | None = None
    """Tools the template is told of."""
    plain: tuple[str, str] | None = None
    """Prompt and answer as text, for a tokenizer without a template; None where only a template can render it."""


def detect_format(fields: Mapping[str, Any], where: str) -> Format:
    """The format of a row, by its keys.

    Raises:
        ValueError: it is none of them; names the keys that are there.
    """
    for name, keys in _KEYS.items():
        if all(fields.get(key) is not None for key in keys):
            return name
    accepted = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in _KEYS.items())
    raise ValueError(
        f"{where}: no conversation among the keys {sorted(fields)}; a row has one of these ({accepted}). Text without "
        "roles is for launch/pretrain.py"
    )


def parse_conversation(fields: Mapping[str, Any], form: Format, where: str) -> Conversation:
    """The conversation of a row in a known format.

    Raises:
        ValueError: names the row, what is wrong with it, and what it should be.
    """
    try:
        missing = [key for key in _KEYS[form] if fields.get(key) is None]
        if missing:
            raise ValueError(f"no key {missing[0]!r} among {sorted(fields)}; the format is {form} since the first row")
        return _PARSERS[form](fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _text(value: Any, name: str) -> str:
    """A string, or the text of OpenAI's list of content parts."""
    if isinstance(value, list):
        parts = []
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise ValueError(f"{name} holds a part that is not text: {str(part)[:80]}; only text can be trained on")
            parts.append(checked_text(part.get("text"), name))
        return "".join(parts)
    return checked_text(value, name)


def _message(item: Any, number: int) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ValueError(f"message {number} is {json_type(item)}; it must be an object with role and content")
    role = item.get("role")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; roles are {', '.join(sorted(ROLES))}")
    # Arrow fills what other rows have with nulls, which a template would take for values.
    message = {key: value for key, value in item.items() if value is not None}
    if "content" not in message and not message.get("tool_calls"):
        found = "null" if "content" in item else "missing"
        raise ValueError(f"the content of message {number} is {found}; it must be a string")
    message["content"] = _text(message.get("content", ""), f"the content of message {number}")
    return message


def _messages(items: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ValueError(f"{key!r} is {json_type(items)}; it must be an array of messages")
    return tuple(_message(item, number) for number, item in enumerate(items, start=1))


def _tools(fields: Mapping[str, Any]) -> list[Any] | None:
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"'tools' is a string that is not JSON: {error.msg}") from error
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"'tools' is {json_type(tools)}; it must be an array")
    return tools or None


def _system(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    """The row's own `system` text, which alpaca and ShareGPT files carry beside the turns."""
    text = fields.get("system")
    return ({"role": "system", "content": _text(text, "'system'")},) if text else ()


def _from_messages(fields: Mapping[str, Any]) -> Conversation:
    return Conversation(messages=_messages(fields["messages"], "messages"), tools=_tools(fields))


def _from_prompt_completion(fields: Mapping[str, Any]) -> Conversation:
    prompt, completion = fields["prompt"], fields["completion"]
    plain = (prompt, completion) if isinstance(prompt, str) and isinstance(completion, str) else None
    sides: list[tuple[Message, ...]] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = fields[key]
        if isinstance(value, str):
            sides.append(({"role": role, "content": checked_text(value, key)},))
        else:
            sides.append(_messages(value, key))
    return Conversation(messages=(*_system(fields), *sides[0], *sides[1]), tools=_tools(fields), plain=plain)


def _from_alpaca(fields: Mapping[str, Any]) -> Conversation:
    instruction = checked_text(fields["instruction"], "instruction")
    given = checked_text(fields.get("input") or "", "input")
    output = checked_text(fields["output"], "output")
    user = f"{instruction}\n\n{given}" if given else instruction
    messages = ({"role": "user", "content": user}, {"role": "assistant", "content": output})
    prompt = (_ALPACA_INPUT if given else _ALPACA).format_map({"instruction": instruction, "input": given})
    return Conversation(messages=(*_system(fields), *messages), plain=(prompt, output))


def _from_sharegpt(fields: Mapping[str, Any]) -> Conversation:
    turns = fields["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError(f"'conversations' is {json_type(turns)}; it must be an array of turns")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if isinstance(turn, Mapping) and "role" in turn:
            messages.append(_message(turn, number))
            continue
        if not isinstance(turn, Mapping) or "from" not in turn:
            raise ValueError(f"turn {number} is {str(turn)[:80]}; it must be an object with from and value")
        role = _SHAREGPT_ROLES.get(turn["from"])
        if role is None:
            raise ValueError(f"turn {number} is from {turn['from']!r}; known are {', '.join(sorted(_SHAREGPT_ROLES))}")
        messages.append({"role": role, "content": checked_text(turn.get("value"), f"the value of turn {number}")})
    return Conversation(messages=(*_system(fields), *messages), tools=_tools(fields))


_KEYS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
"""What a row of each format must have, in the order in which they are looked for."""

_PARSERS: dict[Format, Callable[[Mapping[str, Any]], Conversation]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "prompt_completion": _from_prompt_completion,
    "alpaca": _from_alpaca,
}

assert _KEYS.keys() == set(get_args(Format)), "each format has its keys"
