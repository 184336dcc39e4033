"""Chat templates: the Jinja programs inside checkpoints that turn messages into one prompt.

A template is code from a downloaded file, so it runs in Jinja's immutable sandbox, and whatever exception it ends with
is reported as the template's failure.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A compiled template.

    Args:
      source: Jinja text.
      variables: further names that templates use, such as `bos_token` and `eos_token`.

    Raises ValueError if the template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # syntax errors, and what constant expressions and deep nesting end with
            raise ValueError(f"the model's chat template does not compile: {_reason(error)}") from None
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The prompt text. Raises ValueError if the template rejects the conversation, in its own words, or fails."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template rejects these messages: {_reason(error)}") from None
        except Exception as error:  # foreign code can divide by zero, recurse, look up what is not there, ...
            raise ValueError(f"the model's chat template fails on these messages: {_reason(error)}") from None


def check_messages(messages: Any):
    """Raises ValueError unless `messages` is a non-empty sequence of dicts with the strings `role` and `content`."""
    expected = "chat messages are a non-empty list of dicts like {'role': 'user', 'content': 'Hello'}"
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError(f"{expected}; got {messages!r:.80}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"{expected}; message {i} is {message!r:.80}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"{expected}; {key!r} of message {i} is {message.get(key)!r:.80}")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, jinja2.TemplateError) and text:
        return text
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a prompt must not.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
