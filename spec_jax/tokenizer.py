"""Text to token ids and back, and chat templates.

A tokenizer is built from a Hugging Face `tokenizer.json` or from a GGUF file's metadata; both run in the `tokenizers`
package. Names of special tokens in the text (`<|im_end|>`) become those tokens, in plain prompts and in chat messages
alike, as they do in Hugging Face's tokenizers: text from strangers should be filtered before it gets here.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from spec_jax import fields
from spec_jax.chat_template import ChatTemplate, check_messages

# Ids that end a text although no metadata may say so: end-of-text tokens wherever they are special tokens of the
# vocabulary, and end-of-turn tokens only where the chat template writes them.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
END_OF_TURN = ("<|im_end|>", "<|eot_id|>")


class Tokenizer:
    """One model's tokenizer.

    Args:
      backend: a `tokenizers.Tokenizer`.
      bos_token: beginning-of-text token, or None.
      eos_tokens: tokens that the tokenizer's own files call end of text or end of turn.
      add_bos: whether `encode` puts `bos_token` in front where the backend does not do so itself.
      chat_template: a Jinja template, or None. One that does not compile is a warning, and an error only where a
        conversation is to be rendered: plain prompts and token ids need no template.
      vocab_size: ids 0..vocab_size-1 exist; by default the highest id of the backend + 1.

    Attributes:
      bos_token_id: id or None.
      eos_token_ids: ascending ids that end a text: `eos_tokens`, plus the special tokens of `END_OF_TEXT`, plus those
        of `END_OF_TURN` that the chat template contains.
      special_ids: ids of all special tokens, which `decode` leaves out by default.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_tokens: Sequence[str] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
        vocab_size: int | None = None,
    ):
        backend.no_truncation()  # some published files cut at 512 tokens or pad, which is for training
        backend.no_padding()
        self._backend = backend
        self.vocab_size = vocab_size or max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size < 1:
            raise ValueError("the tokenizer has no tokens")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        well_known = [*END_OF_TEXT, *(name for name in END_OF_TURN if name in (chat_template or ""))]
        ids = {backend.token_to_id(name) for name in well_known} & self.special_ids
        ids |= {backend.token_to_id(name) for name in eos_tokens} - {None}
        self.eos_token_ids = tuple(sorted(ids))
        self._add_bos = add_bos and self.bos_token_id is not None
        variables = {"bos_token": bos_token or "", "eos_token": eos_tokens[0] if eos_tokens else ""}
        self._template, self._no_template = None, "this model has no chat template"
        if chat_template is not None:
            try:
                self._template = ChatTemplate(chat_template, variables)
            except ValueError as error:
                self._no_template = str(error)
                warnings.warn(f"{error}; the model takes plain prompts and token ids only", stacklevel=3)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text.

        Adds what the model's own tokenizer adds (Llama 3: one beginning-of-text id; SmolLM2 and Qwen: nothing), unless
        `add_special_tokens` is False, as for a text that continues another.
        """
        if not isinstance(text, str):
            raise ValueError(f"encode takes a str, got {type(text).__name__}: {text!r:.60}")
        ids = self._encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8, such as half a character at the end, become U+FFFD.

        Raises ValueError for an id outside 0..vocab_size-1.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary; ids are 0..{self.vocab_size - 1}")
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, as the model was trained to see it.

        Args:
          messages: dicts with the strings `role` (system, user, assistant, ...) and `content`.
          add_generation_prompt: whether to end with the header of an assistant turn.

        Raises ValueError if the model has no chat template, a message is malformed, or the template rejects the
        conversation (for example two user turns in a row), fails on it or does not compile.
        """
        return self._encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text that `apply_chat_template` encodes."""
        check_messages(messages)
        if self._template is None:
            raise ValueError(f"{self._no_template}; give the prompt as a str or as token ids")
        return self._template.render(messages, add_generation_prompt)

    def token_to_id(self, token: str) -> int | None:
        """Id of one token by its spelling in the vocabulary; None if there is no such token."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Spelling in the vocabulary (byte-level alphabet, not text); None for an id without a token."""
        return self._backend.id_to_token(token_id)

    @functools.cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token to id, added tokens included; two models can share drafts only where these agree."""
        return self._backend.get_vocab(with_added_tokens=True)

    def describe_decoding(self) -> tuple[dict[str, Any] | None, frozenset[int]]:
        """What `decode` does: its decoder as `tokenizer.json` describes it (None: it has none), and all added ids."""
        carrier = tokenizers.Tokenizer(models.BPE())  # a description of the backend would hold the vocabulary too
        carrier.decoder = self._backend.decoder
        return json.loads(carrier.to_str())["decoder"], frozenset(self._backend.get_added_tokens_decoder())

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # a lone surrogate, as json.loads can make
            raise ValueError(f"the text is not valid Unicode: {error}") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; None without a `tokenizer.json`."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{path} cannot be read: {error}") from None
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = fields.read_json(config_path) if config_path.exists() else {}
    if template_path.exists():
        try:
            template = template_path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{template_path} is not UTF-8 text (byte {error.start})") from None
    else:
        template = _template_text(config, str(config_path))
    eos = _token_text(config, "eos_token", str(config_path))
    return Tokenizer(
        backend,
        bos_token=_token_text(config, "bos_token", str(config_path)),
        eos_tokens=() if eos is None else (eos,),
        add_bos=fields.get(config, "add_bos_token", bool, False, where=str(config_path)),
        chat_template=template,
    )


def _template_text(config: Mapping[str, Any], where: str) -> str | None:
    """The `chat_template` of `tokenizer_config.json`: a string, or a list of named ones of which "default" counts."""
    entry = config.get("chat_template")
    if not isinstance(entry, list):
        return fields.get(config, "chat_template", str, where=where)
    named = {}
    for item in entry:
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("name", "template")):
            raise fields.wrong("an entry of chat_template", item, "an object with the strings name and template", where)
        named[item["name"]] = item["template"]
    return named.get("default")


def _token_text(config: Mapping[str, Any], key: str, where: str) -> str | None:
    """A token in `tokenizer_config.json` is a string or an object that describes it."""
    if isinstance(config.get(key), dict):
        return fields.get(config[key], "content", str, where=f"{where}: {key}")
    return fields.get(config, key, str, where=where)


# --- GGUF -------------------------------------------------------------------------------------------------------------

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_NAMES = ("gpt-2", "gpt2", "default")
_DIGIT_NAMES = ("smollm", "starcoder")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
PRE_TOKENIZERS = (*_GPT2_NAMES, *_DIGIT_NAMES, *_LLAMA3_NAMES, *_QWEN2_NAMES)


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer | None:
    """Builds the tokenizer that `tokenizer.ggml.*` describes: byte-level BPE (`gpt2`) with a known pre-tokenizer.

    Returns None, with a warning that gives the reason, where the tokenizer is of another kind: a wrong split of the
    text would change outputs in silence, while token-id prompts still work. A file without the name of its
    pre-tokenizer (written before May 2024) is read as GPT-2's, with a warning. `add_eos_token` is ignored: a prompt
    that is to be continued must not end with an end token.

    Args:
      metadata: all keys of the file.
      where: the file's name, for messages.
    """

    def get(key: str, kind: Any, default: Any = None) -> Any:
        return fields.get(metadata, key, kind, default, where=where)

    kind = get("tokenizer.ggml.model", str)
    if kind is None:
        return None
    pre = get("tokenizer.ggml.pre", str)
    if kind != "gpt2" or (pre is not None and pre not in PRE_TOKENIZERS):
        name = f"tokenizer model {kind!r}" if kind != "gpt2" else f"pre-tokenizer {pre!r}"
        known = "'gpt2'" if kind != "gpt2" else ", ".join(PRE_TOKENIZERS)
        warnings.warn(
            f"{where}: {name} is not supported (supported: {known}), so the model has no tokenizer;"
            " prompts must be token ids",
            stacklevel=2,
        )
        return None
    if pre is None:
        message = f"{where} does not name its pre-tokenizer; reading it as GPT-2's, which may split text wrongly"
        warnings.warn(message, stacklevel=2)
        pre = "gpt-2"
    tokens, types = _vocabulary(metadata, where)
    merges = []
    for merge in get("tokenizer.ggml.merges", list[str], ()):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{where} is damaged: {error}") from None
    backend = tokenizers.Tokenizer(model)
    if pre in _QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    by_type = {kind: [t for t, k in zip(tokens, types, strict=True) if k == kind] for kind in (_CONTROL, _USER_DEFINED)}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in by_type[_CONTROL]])
    backend.add_tokens([AddedToken(token, normalized=False) for token in by_type[_USER_DEFINED]])

    def token(key: str) -> str | None:
        index = get(f"tokenizer.ggml.{key}_token_id", int)
        return tokens[index] if index is not None and 0 <= index < len(tokens) else None

    return Tokenizer(
        backend,
        bos_token=token("bos"),
        eos_tokens=[name for name in map(token, ("eos", "eot", "eom")) if name is not None],
        add_bos=get("tokenizer.ggml.add_bos_token", bool, pre in _LLAMA3_NAMES),
        chat_template=get("tokenizer.chat_template", str),
        vocab_size=len(tokens),
    )


def _vocabulary(metadata: Mapping[str, Any], where: str) -> tuple[list[str], list[int]]:
    """Tokens and their types, without the `[PAD...]` entries that converters append up to the embedding's rows."""
    tokens = list(fields.get(metadata, "tokenizer.ggml.tokens", list[str], (), where))
    types = list(fields.get(metadata, "tokenizer.ggml.token_type", list[int], [1] * len(tokens), where))
    if len(tokens) != len(types):
        raise ValueError(f"{where} is damaged: {len(tokens)} tokens but {len(types)} token types")
    while tokens and types[-1] == _UNUSED and tokens[-1].startswith("[PAD"):
        tokens.pop()
        types.pop()
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{where} lists {len(tokens)} tokens of which only {len(set(tokens))} differ")
    return tokens, types


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGIT_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = _LLAMA3_SPLIT if name in _LLAMA3_NAMES else _QWEN2_SPLIT
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
