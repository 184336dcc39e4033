"""A corpus file as a `SuffixIndex` for retrieval: built once, kept in the cache folder, loaded to the device."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_jax import hub
from spec_jax.suffix_index import MAX_TOKENS, SuffixIndex, build, is_whole

MAX_BYTES = 4 * MAX_TOKENS
"""Of a corpus file; a token of English text has about four."""
VERSION = 1
KEPT = 2

_loaded: collections.OrderedDict[Any, tuple[SuffixIndex, Any]] = collections.OrderedDict()  # with the tokenizer


def load_datastore(path: str | Path, tokenizer: Any, depth: int) -> SuffixIndex:
    """The index of a corpus file, on the default device.

    Args:
      path: UTF-8: a `.jsonl` file with one text per line, as a string or as an object with `text`, or any other file as
        a single text.
      tokenizer: of the target; encodes the texts without special tokens.
      depth: tokens of a suffix that is looked up and of what is drafted behind it together.

    Raises:
      ValueError: a file that is too large, empty, or not as said. OSError: one that cannot be read.
    """
    try:
        path = Path(path).expanduser()
        found = path.stat()
        if not path.is_file():
            raise ValueError("it is not a file")
    except (OSError, RuntimeError, ValueError) as error:  # no such user, characters that no path has
        kind = type(error) if isinstance(error, OSError) else ValueError
        raise kind(f"datastore={str(path)!r} must be a corpus file that can be read: {error}") from None
    key = str(path.resolve()), found.st_mtime_ns, found.st_size, depth, id(tokenizer)
    if key not in _loaded:
        if found.st_size > MAX_BYTES:
            raise ValueError(f"datastore={path} has {found.st_size} bytes; at most {MAX_BYTES} can be loaded, which is "
                             f"about {MAX_TOKENS} tokens: give a smaller corpus")  # fmt: skip
        _loaded[key] = jax.device_put(_built(path, tokenizer, depth)), tokenizer  # which keeps its id
        while len(_loaded) > KEPT:
            _loaded.popitem(last=False)
    _loaded.move_to_end(key)
    return _loaded[key][0]


def _built(path: Path, tokenizer: Any, depth: int) -> SuffixIndex:
    content = path.read_bytes()
    words = json.dumps(sorted(tokenizer.vocabulary.items())).encode()
    key = hashlib.sha256(b"|".join((content, words, f"{depth} {VERSION}".encode()))).hexdigest()[:16]
    kept = hub.cache_folder() / "datastores" / f"{path.stem}-{key}.npz"
    names = [field.name for field in dataclasses.fields(SuffixIndex) if field.name != "depth"]
    try:
        with open(kept, "rb") as file, np.load(file) as arrays:  # np.load leaves a damaged file open
            index = SuffixIndex(*(arrays[name] for name in names), depth)
        if is_whole(index):
            return index
    except Exception:  # not there, or damaged in one of many ways; it can be built again
        pass
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in _texts(path, content)]
    if not any(texts):
        raise ValueError(f"datastore={path} holds no text")
    index = build(texts, depth)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            temporary = Path(folder) / kept.name
            np.savez(temporary, **{name: getattr(index, name) for name in names})
            os.replace(temporary, kept)
    except OSError:  # it can be built again
        pass
    return index


def _texts(path: Path, content: bytes) -> Iterator[str]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"datastore={path} is not UTF-8 text (byte {error.start})") from None
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"datastore={path}, line {number}: not valid JSON ({error})") from None
        record = record.get("text") if isinstance(record, dict) else record
        if not isinstance(record, str):
            raise ValueError(f"datastore={path}, line {number}: must be a string or an object with the string `text`")
        yield record
