"""The demo's requests: multi-turn conversations over a real text, sharing one system prompt.

Each request is one turn: the system prompt, everything said before, and the user's new question. Some conversations
repeat another word for word, and some ask the same at first and then differ by one word, which falls inside a KV block.
What the assistant said before is scripted, so every row of a prompt is made by prefill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

Kind = Literal["own", "identical", "diverging"]

#: The kinds of the first conversations; later ones alternate between identical and diverging once topics run out.
_OPENING: tuple[Kind, ...] = ("own", "own", "identical", "own", "diverging", "own", "own", "own")
_REPLACEMENTS = ("quietly", "copper", "yesterday", "willow", "perhaps", "northern", "seven", "lantern")
_SPECIALS = ("<pad>", "<s>", "</s>")


@dataclass(frozen=True)
class Turn:
    """What the user asks and what the assistant answers."""

    user: str
    assistant: str


@dataclass(frozen=True)
class Conversation:
    """A title and its turns."""

    title: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class DemoRequest:
    """One turn of one conversation as a prompt.

    Attributes:
        req_id: ``c03.t2`` for the second turn of the fourth conversation.
        title: the conversation's topic.
        turn: from 1.
        kind: how its conversation relates to the others.
        tokens: the prompt's token ids.
    """

    req_id: str
    title: str
    turn: int
    kind: Kind
    tokens: tuple[int, ...]


def read_text() -> str:
    """The conversations shipped with the package."""
    return files("stagecache.demo").joinpath("conversations.md").read_text(encoding="utf-8")


def parse_text(text: str) -> tuple[str, tuple[Conversation, ...]]:
    """System prompt and conversations of a text with ``# title``, ``user:`` and ``assistant:`` lines."""
    sections = [part.split("\n", 1) for part in re.split(r"^# ", text, flags=re.MULTILINE) if part.strip()]
    system = ""
    conversations = []
    for title, body in sections:
        if title == "system":
            system = _one_line(body)
            continue
        parts = re.split(r"^(?:user|assistant):", body, flags=re.MULTILINE)
        said = [_one_line(part) for part in parts if part.strip()]
        turns = tuple(Turn(user, assistant) for user, assistant in zip(said[::2], said[1::2], strict=True))
        conversations.append(Conversation(title, turns))
    return system, tuple(conversations)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def train_tokenizer(text: str, vocab: int) -> Any:
    """A byte-level BPE tokenizer with at most ``vocab`` entries, trained on the text; any text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Put the tokenizer beside a checkpoint, in the form that transformers reads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    pad, bos, eos = _SPECIALS
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", '
        f'"pad_token": "{pad}", "bos_token": "{bos}", "eos_token": "{eos}"}}\n',
        encoding="utf-8",
    )


def build_requests(tokenizer: Any, text: str, count: int) -> list[list[DemoRequest]]:
    """``count`` requests in waves: wave k holds turn k of every conversation, and a wave starts when the last ended."""
    system, topics = parse_text(text)
    turns = min(len(topic.turns) for topic in topics)
    plan = list(_plan(topics, -(-count // turns)))
    waves: list[list[DemoRequest]] = []
    left = count
    for turn in range(1, turns + 1):
        wave = []
        for number, (conversation, kind) in enumerate(plan[: max(left, 0)]):
            prompt = _prompt(system, conversation.turns[:turn])
            tokens = tuple(tokenizer.encode(prompt).ids)
            wave.append(DemoRequest(f"c{number:02d}.t{turn}", conversation.title, turn, kind, tokens))
        left -= len(wave)
        waves.append(wave)
    return [wave for wave in waves if wave]


def _plan(topics: Sequence[Conversation], count: int) -> Iterator[tuple[Conversation, Kind]]:
    """``count`` conversations, each with its kind."""
    fresh = list(topics)
    used: list[Conversation] = []
    for number in range(count):
        kind: Kind = _OPENING[number] if number < len(_OPENING) else ("diverging", "identical")[number % 2]
        if kind == "own" and fresh:
            used.append(fresh.pop(0))
            yield used[-1], "own"
        elif kind == "identical":
            yield used[number % len(used)], "identical"
        else:
            yield _diverge(used[number % len(used)], number), "diverging"


def _diverge(conversation: Conversation, number: int) -> Conversation:
    """The same conversation with one word of its second question replaced; which one depends on ``number``."""
    turns = list(conversation.turns)
    words = turns[1].user.split(" ")
    words[len(words) // 2 + number % 5] = _REPLACEMENTS[number % len(_REPLACEMENTS)]
    turns[1] = Turn(" ".join(words), turns[1].assistant)
    return Conversation(conversation.title, tuple(turns))


def _prompt(system: str, turns: Sequence[Turn]) -> str:
    said = [f"System: {system}\n"]
    for turn in turns[:-1]:
        said += [f"Visitor: {turn.user}\n", f"Guide: {turn.assistant}\n"]
    return "".join([*said, f"Visitor: {turns[-1].user}\n", "Guide:"])
