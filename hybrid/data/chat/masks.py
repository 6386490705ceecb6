"""Conversations to token ids, and which of them the model learns to write.

Which text an assistant turn is, the template says itself (`{% generation %}`), or it is derived: the conversation up to
the turn, rendered with the generation prompt, must be the beginning of the whole, and so must the conversation with
the turn; what lies between the two is the turn. Anything else is an error, never a guess. The text becomes tokens
once, and each token's place in it decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybrid.data.chat.formats import Conversation, Message
from hybrid.data.chat.tokenizer import ChatTokenizer

TrainOn = Literal["all", "last"]
"""Which assistant turns are supervised."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A conversation as tokens."""

    ids: list[int]
    supervised: list[bool]
    """Whether the token is one the model learns to write."""
    ends: list[int]
    """The last token of each supervised turn."""
    merged: int = 0
    """Tokens that hold characters of a supervised turn and of its surroundings; they are not supervised."""

    @property
    def has_target(self) -> bool:
        """Whether anything is learnt: the first token of a sample has no context to be predicted from."""
        return any(self.supervised[1:])


class ChatEncoder:
    """Encodes conversations with one tokenizer and template."""

    def __init__(self, tokenizer: ChatTokenizer, train_on: TrainOn = "all") -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._marked = tokenizer.template is not None and _GENERATION.search(tokenizer.template) is not None

    @property
    def method(self) -> str:
        """How turns are found, for people."""
        if self._tokenizer.template is None:
            return "the answer after the prompt"
        return "the template's generation marks" if self._marked else "derived from the template"

    def encode(self, conversation: Conversation, where: str) -> Encoded:
        """Tokens and mask of a conversation; it may turn out to have no target.

        Raises:
            ValueError: the template refuses the conversation, or its turns cannot be told apart; names the row.
        """
        try:
            if self._tokenizer.template is None:
                return self._encode_plain(conversation)
            return self._encode_chat(conversation)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens after which the model answers `text`: what a user says, or plain text without a template.

        Raises:
            ValueError: the template refuses it.
        """
        if self._tokenizer.template is None:
            return self._tokens(text, []).ids
        return self._tokens(self._render([{"role": "user", "content": text}], None, prompt=True), []).ids

    def _encode_plain(self, conversation: Conversation) -> Encoded:
        if conversation.plain is None:
            raise ValueError(
                f"tokenizer {self._tokenizer.name!r} has no chat template, and messages need one: name one with "
                "--chat_template (a file, or one that comes with the package: chatml, llama2, llama3, mistral, zephyr)"
            )
        prompt, answer = conversation.plain
        if not answer.strip():
            return self._tokens(prompt, [])
        encoded = self._tokens(prompt + answer, [(len(prompt), len(prompt) + len(answer))])
        eos = self._tokenizer.eos_id
        if eos is None:
            raise ValueError(f"tokenizer {self._tokenizer.name!r} has no eos_token, so no answer would ever end")
        return Encoded(
            ids=[*encoded.ids, eos], supervised=[*encoded.supervised, True], ends=[eos], merged=encoded.merged
        )

    def _encode_chat(self, conversation: Conversation) -> Encoded:
        messages = _without_tail(conversation.messages)
        wanted = _supervised_turns(messages, self._train_on)
        if not wanted:
            return Encoded(ids=[], supervised=[], ends=[])
        if self._marked:
            text, spans = self._marked_spans(messages, conversation.tools, wanted)
        else:
            text = self._render(messages, conversation.tools)
            spans = [self._derived_span(messages, conversation.tools, turn, text) for turn in wanted]
        return self._tokens(text, spans)

    def _render(self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        from jinja2.exceptions import TemplateError

        tokenizer = self._tokenizer
        try:
            text = tokenizer.renderer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=tokenizer.template,
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (TemplateError, TypeError) as error:
            roles = " ".join(message["role"] for message in messages) or "no message"
            raise ValueError(f"the chat template refuses this conversation ({roles}): {error}") from error
        return str(text)

    def _derived_span(self, messages: Sequence[Message], tools: list[Any] | None, turn: int, text: str) -> Span:
        before = self._render(messages[:turn], tools, prompt=True)
        after = self._render(messages[: turn + 1], tools)
        if not text.startswith(after) or not after.startswith(before) or len(before) >= len(after):
            raise ValueError(
                f"the text of message {turn + 1} cannot be told from the rest, because the chat template writes "
                "earlier turns in another way once later ones follow: set train_on to last, or give a template with "
                "{% generation %} marks"
            )
        return len(before), _end_of_turn(after, len(before), messages[turn]["content"])

    def _marked_spans(
        self, messages: Sequence[Message], tools: list[Any] | None, wanted: Sequence[int]
    ) -> tuple[str, list[Span]]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer
        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=tools,
                chat_template=tokenizer.template,
                return_assistant_tokens_mask=True,
                **tokenizer.renderer.special_tokens_map,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        (text,), (marks,) = rendered
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marks) != len(turns):
            raise ValueError(
                f"the template marks {len(marks)} generations in a conversation of {len(turns)} assistant turns"
            )
        marked = dict(zip(turns, marks, strict=True))
        return text, [self._with_end(messages, tools, turn, text, marked[turn]) for turn in wanted]

    def _with_end(self, messages: Sequence[Message], tools: list[Any] | None, turn: int, text: str, span: Span) -> Span:
        """The marked span, with the end token where the marks leave it out."""
        start, stop = span
        after = self._render(messages[: turn + 1], tools)
        if not text.startswith(after):
            return span
        if stop >= len(after.rstrip()):
            return start, _end_of_turn(after[:stop], start, messages[turn]["content"])
        following = self._tokenizer.splitter.encode(after[stop:], add_special_tokens=False)
        added = self._tokenizer.renderer.added_tokens_decoder
        if following.ids and following.ids[0] in added and following.offsets[0][0] == 0:
            return start, stop + following.offsets[0][1]
        return span

    def _tokens(self, text: str, spans: Sequence[Span]) -> Encoded:
        pieces = self._split(text, [start for start, _ in spans])
        ids, places = [token for token, _ in pieces], [place for _, place in pieces]
        supervised, ends, merged, token = [False] * len(ids), [], 0, 0
        for start, stop in spans:
            while token < len(ids) and places[token][0] < start:
                if places[token][1] > start:
                    if text[places[token][0] : start].isspace():
                        break  # an answer's word with the space before it: the answer's, all the same
                    merged += 1
                token += 1
            first = token
            while token < len(ids) and places[token][0] < stop and places[token][1] <= stop:
                supervised[token] = True
                token += 1
            merged += token < len(ids) and places[token][0] < stop
            if token > first:
                ends.append(ids[token - 1])
        self._one_bos(ids, supervised)
        return Encoded(ids=ids, supervised=supervised, ends=ends, merged=merged)

    def _split(self, text: str, starts: Sequence[int]) -> list[tuple[int, Span]]:
        """(token, place in the text): no token reaches over a start where the text can be cut there.

        The prompt is tokenised by itself when the model is used, so a token that joins its last characters with the
        answer's first is not what the model will see. A tokenizer that marks the beginnings of texts would put its
        mark at a cut; then the text stays whole, and a token of both sides is not learnt.
        """
        encoding = self._tokenizer.splitter.encode(text, add_special_tokens=False)
        whole = list(zip(encoding.ids, encoding.offsets, strict=True))
        cuts = [start for start in starts if any(a < start < b for a, b in encoding.offsets)]
        if not cuts:
            return whole
        parts = []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece = self._tokenizer.splitter.encode(text[begin:end], add_special_tokens=False)
            parts += [(i, (a + begin, b + begin)) for i, (a, b) in zip(piece.ids, piece.offsets, strict=True)]
        decode = self._tokenizer.splitter.decode
        same = decode([i for i, _ in parts], skip_special_tokens=False) == decode(
            encoding.ids, skip_special_tokens=False
        )
        return parts if same else whole

    def _one_bos(self, ids: list[int], supervised: list[bool]) -> None:
        """The template may write a BOS, once or twice, or leave it to the tokenizer: leave exactly one in front."""
        written = self._tokenizer.renderer.bos_token_id
        while written is not None and ids[:2] == [written, written]:
            del ids[0], supervised[0]
        bos = self._tokenizer.bos_id
        if bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
            supervised.insert(0, False)


def _without_tail(messages: Sequence[Message]) -> Sequence[Message]:
    """Up to the last assistant turn: nothing after it is learnt, or seen by what is."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: turns[-1] + 1] if turns else ()


def _supervised_turns(messages: Sequence[Message], train_on: TrainOn) -> list[int]:
    """The assistant turns to learn: those that say something, and that `weight` 0 does not exclude."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on == "last":
        turns = turns[-1:]
    return [turn for turn in turns if _says_something(messages[turn]) and messages[turn].get("weight", 1)]


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _end_of_turn(text: str, start: int, content: str) -> int:
    """Where a turn that begins at `start` and ends with `text` ends: after its end token, before white space.

    Where nothing but white space follows the content, that is all that can end the turn, and it stays.
    """
    stripped, said = text.rstrip(), content.rstrip()
    unmarked = bool(said) and stripped.endswith(said)
    return len(text) if unmarked or len(stripped) <= start else len(stripped)
