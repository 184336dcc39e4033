"""Prompts for `spec-jax bench`: the built-in set and a reader for JSON-lines files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

DEFAULT_CATEGORY = "other"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation that ends with the user's turn."""

    category: str
    messages: tuple[dict[str, str], ...]

    @property
    def text(self) -> str:
        """The conversation without roles, for models that have no chat template."""
        return "\n\n".join(message["content"] for message in self.messages)


def builtin_prompts() -> list[Prompt]:
    """24 prompts written for this project: chat, code_editing, summarising, extraction, maths, translation."""
    source = resources.files("spec_jax").joinpath("data/bench_prompts.jsonl")
    return parse_prompts(source.read_text(encoding="utf-8").split("\n"), "built-in prompts")


def read_prompts(path: str | Path) -> list[Prompt]:
    """Reads a JSON-lines file in the MT-bench (`turns`) or the chat (`messages`) format.

    Of `turns` the first is used, because the later ones depend on answers that are not in the file. `messages` are used
    up to the last one of the user. A `category` beside them is optional. Raises ValueError naming file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); expected JSON lines") from None
    return parse_prompts(text.split("\n"), str(path))  # splitlines would also split at U+2028 inside a string


def parse_prompts(lines: Iterable[str], source: str) -> list[Prompt]:
    """Turns JSON lines into prompts; `source` names them in errors. Blank lines are skipped."""
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt_from_record(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}, line {number}: not valid JSON ({error.msg} at column {error.colno})") from None
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{source} holds no prompts; expected one JSON object a line with 'turns' or 'messages'")
    return prompts


def limit_per_category(prompts: Sequence[Prompt], max_prompts: int | None) -> list[Prompt]:
    """The first `max_prompts` of every category, in their order; None keeps all."""
    if max_prompts is None:
        return list(prompts)
    if max_prompts < 1:
        raise ValueError(f"max_prompts={max_prompts} must be at least 1")
    kept, seen = [], {}
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if seen[prompt.category] <= max_prompts:
            kept.append(prompt)
    return kept


def has_chat_template(target: Any) -> bool:
    """Whether prompts can be given to `target` as chat messages."""
    return target.tokenizer.has_chat_template


def model_input(target: Any, prompt: Prompt) -> str | list[dict[str, str]]:
    """The prompt as `generate` takes it: messages where the model has a chat template, else the text alone."""
    return list(prompt.messages) if has_chat_template(target) else prompt.text


def _prompt_from_record(record: Any) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    category = record.get("category", DEFAULT_CATEGORY)
    if not isinstance(category, str) or not category:
        raise ValueError(f"category={category!r} must be a non-empty string")
    if category == "all":
        raise ValueError("category='all' is reserved for the totals; rename it")
    if "messages" in record:
        messages = _checked_messages(record["messages"])
    elif "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
            raise ValueError("'turns' must be a list of strings whose first is not empty")
        messages = ({"role": "user", "content": turns[0]},)
    else:
        raise ValueError("neither 'turns' (MT-bench) nor 'messages' (chat) is present")
    return Prompt(category, messages)


def _checked_messages(messages: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a non-empty list")
    checked = []
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError("every entry of 'messages' needs the strings 'role' and 'content'")
        checked.append({"role": message["role"], "content": message["content"]})
    users = [index for index, message in enumerate(checked) if message["role"] == "user"]
    if not users:
        raise ValueError("'messages' holds no message with role 'user'")
    return tuple(checked[: users[-1] + 1])
