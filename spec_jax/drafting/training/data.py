"""Training texts of a drafter: the target's own answers, generated once and kept on disk in shards.

A drafter learns to foresee what its target writes, so the answers are the target's, not those of a data set (Medusa,
https://arxiv.org/abs/2401.10774, section 2.3.2, and DistillSpec, https://arxiv.org/abs/2310.08461, section 4). A folder
holds `manifest.json`, which says how its texts were made, and `shard-00000.npz`, ... of a fixed number of texts. A
shard is written under another name and renamed, so that one that stands there is whole, and a run that was killed goes
on with the first that is missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_jax.checks import check_counts, is_int, is_number
from spec_jax.drafting.training.packed_rows import BatchStream
from spec_jax.generation import generate
from spec_jax.requests import encode_prompts, sample_seed

MANIFEST = "manifest.json"
FORMAT = 1
SPLITS = ("train", "held_out", "all")


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """What a folder holds, and what one call of `generate_responses` did.

    Attributes:
      texts: prompts that were answered, by this call or before it.
      prompts_too_long: prompts that were left out because they have more than `max_prompt_tokens` tokens.
      shards, shards_found: all shards, and those among them that stood there already.
      prompt_tokens, response_tokens: in all shards.
      new_tokens, seconds: response tokens that this call generated, and the time that took, compilation included.
    """

    texts: int
    prompts_too_long: int
    shards: int
    shards_found: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0


def generate_responses(
    target: Any,
    prompts: Sequence[Any],
    folder: str | Path,
    *,
    max_tokens: int = 256,
    temperature: float | Sequence[float] = 0.0,
    batch_size: int = 64,
    shard_size: int = 256,
    max_prompt_tokens: int | None = None,
    seed: int = 0,
    progress: Callable[[GenerationStats], None] | None = None,
) -> GenerationStats:
    """Answers every prompt with the target and keeps the texts in `folder`; a second call goes on where it was killed.

    Args:
      target: a loaded `Model`.
      prompts: as `spec_jax.generate` takes them: strings, token ids or conversations. Shards keep their order, so mix
        kinds of prompts before.
      folder: made if it does not exist. Shards in it are kept if its manifest says the same as this call.
      max_tokens: of one answer. The id that ends a text is part of the answer.
      temperature: one for all, or one per prompt; 0 is greedy.
      batch_size: rows decoded side by side.
      shard_size: texts per file; the last may hold fewer.
      max_prompt_tokens: longer prompts are left out and counted. None: what leaves room for `max_tokens` in the
        target's context.
      seed: with the prompt's place among the prompts it decides the random numbers of its answer.
      progress: called after every shard.

    Raises:
      ValueError: for bad input, and where `folder` holds texts that were made in another way.
    """
    check_counts(max_tokens=max_tokens, batch_size=batch_size, shard_size=shard_size)
    if not is_int(seed) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be an integer in 0..2**32-1")
    ids = encode_prompts(target, prompts)
    if not ids:
        raise ValueError("prompts is empty; give at least one prompt")
    temperatures = _temperatures(temperature, len(ids))
    limit = _prompt_limit(target, max_tokens, max_prompt_tokens)
    kept = [i for i, prompt in enumerate(ids) if len(prompt) <= limit]
    if not kept:
        raise ValueError(f"all {len(ids)} prompts have more than max_prompt_tokens={limit} tokens; raise it")
    folder = Path(folder)
    manifest = {
        "format": FORMAT,
        "target": target.name,
        "vocab_size": target.vocab_size,
        "prompts": _hash_of(ids),
        "num_prompts": len(ids),
        "temperatures": hashlib.sha256(np.asarray(temperatures, np.float64).tobytes()).hexdigest(),
        "max_tokens": max_tokens,
        "max_prompt_tokens": limit,
        "seed": seed,
        "shard_size": shard_size,
        "texts": len(kept),
        "shards": -(-len(kept) // shard_size),
    }
    _open_folder(folder, manifest)
    stats = GenerationStats(len(kept), len(ids) - len(kept), manifest["shards"])
    for number in range(manifest["shards"]):
        path = folder / _shard_name(number)
        if path.exists():
            shard, new, seconds = _read_shard(path), 0, 0.0
        else:
            begin = time.perf_counter()
            which = kept[number * shard_size : (number + 1) * shard_size]
            result = generate(
                target,
                [ids[i] for i in which],
                None,
                [
                    {"temperature": temperatures[i], "max_tokens": max_tokens, "seed": sample_seed(seed, i)}
                    for i in which
                ],
                exact=False,  # the fastest; a shard is always decoded in the same company
                max_batch_size=batch_size,
                progress=False,
            )
            answers = [sequence.token_ids for sequence in result.sequences]
            shard = _shard_of([ids[i] for i in which], answers, which, [temperatures[i] for i in which])
            _write(path, lambda file, shard=shard: np.savez(file, **shard))
            new, seconds = sum(map(len, answers)), time.perf_counter() - begin
        in_prompts = int(shard["prompt_lengths"].sum())
        stats = dataclasses.replace(
            stats,
            shards_found=stats.shards_found + (not seconds),
            prompt_tokens=stats.prompt_tokens + in_prompts,
            response_tokens=stats.response_tokens + len(shard["tokens"]) - in_prompts,
            new_tokens=stats.new_tokens + new,
            seconds=stats.seconds + seconds,
        )
        if progress is not None:
            progress(stats)
    return stats


class Responses:
    """The texts of a folder that `generate_responses` has written to, as far as it has got.

    Args:
      folder: one with a manifest, or a folder of such folders, which are read in the order of their names.
      held_out: share of the texts kept out of training, in [0, 1). A hash of the prompt decides, so that answers to
        one prompt fall on one side, and a text keeps its side when more are added.
      max_shards: read only so many, in order; None reads those that stand there now. A run that goes on later finds
        the same texts with the number that `num_shards` told the first one.

    Attributes:
      num_shards: files read.
      manifests: of the folders read.
    """

    def __init__(self, folder: str | Path, held_out: float = 0.05, max_shards: int | None = None):
        if not is_number(held_out) or not 0 <= held_out < 1:
            raise ValueError(f"held_out={held_out!r} must be a number in [0, 1)")
        if max_shards is not None:
            check_counts(max_shards=max_shards)
        folder = Path(folder)
        folders = (
            [folder] if (folder / MANIFEST).exists() else sorted(path.parent for path in folder.glob("*/" + MANIFEST))
        )
        if not folders:
            raise ValueError(f"{folder} holds no {MANIFEST}; make the texts with generate_responses first")
        self.manifests = [_read_manifest(path) for path in folders]
        for path, manifest in zip(folders, self.manifests, strict=True):
            for name in ("target", "vocab_size"):
                if manifest[name] != self.manifests[0][name]:
                    raise ValueError(f"{path} holds texts of {name}={manifest[name]!r} and {folders[0]} of "
                                     f"{self.manifests[0][name]!r}; a drafter learns from one target")  # fmt: skip
        files = [
            path / _shard_name(number)
            for path, manifest in zip(folders, self.manifests, strict=True)
            for number in range(manifest["shards"])
            if (path / _shard_name(number)).exists()
        ][:max_shards]
        if not files:
            raise ValueError(f"{folder} holds no finished shard yet; wait for generate_responses to write the first")
        if max_shards is not None and len(files) < max_shards:
            raise ValueError(f"max_shards={max_shards}, but {folder} holds only {len(files)} finished shards")
        shards = [_read_shard(path) for path in files]
        self.num_shards = len(files)
        self.tokens = np.concatenate([shard["tokens"] for shard in shards])
        self.lengths = np.concatenate([np.diff(shard["offsets"]) for shard in shards])
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.prompt_lengths = np.concatenate([shard["prompt_lengths"] for shard in shards])
        self.temperatures = np.concatenate([shard["temperatures"] for shard in shards])
        draws = np.array([_draw(self[i]) for i in range(len(self))])
        self._held_out = draws < held_out

    @property
    def target(self) -> str:
        """Name of the model that wrote the texts."""
        return self.manifests[0]["target"]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """(token ids int32 of prompt and answer, tokens of the prompt) of one text."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.tokens[self.offsets[index] : self.offsets[index + 1]], int(self.prompt_lengths[index])

    @property
    def texts(self) -> list[tuple[np.ndarray, int]]:
        """All texts, see `__getitem__`."""
        return [self[i] for i in range(len(self))]

    def indices(self, split: str = "train") -> np.ndarray:
        """Indices of the texts of "train", "held_out" or "all", ascending."""
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is not known; use one of {', '.join(SPLITS)}")
        if split == "all":
            return np.arange(len(self))
        return np.flatnonzero(self._held_out == (split == "held_out"))

    def batches(
        self,
        batch: int,
        length: int,
        seed: int = 0,
        start_step: int = 0,
        *,
        split: str = "train",
        learn_prompts: bool = False,
    ) -> BatchStream:
        """An endless stream of `Batch`es of a split, which depends on the texts, `seed` and the step alone.

        Args:
          batch, length: rows, and tokens per row.
          start_step: the first step to give, as a run does that goes on.
          learn_prompts: mark the prompts' tokens for the loss too, all but the first of a text.
        """
        indices = self.indices(split)
        if not len(indices):
            raise ValueError(f"no text of {len(self)} is in the split {split!r}; add texts or change held_out")
        return BatchStream([self[i] for i in indices], batch, length, seed, start_step, learn_prompts)


def _temperatures(asked: Any, count: int) -> list[float]:
    values = (
        list(asked) if isinstance(asked, (Sequence, np.ndarray)) and not isinstance(asked, str) else [asked] * count
    )
    if len(values) != count:
        raise ValueError(f"{len(values)} temperatures were given for {count} prompts; give one, or as many")
    wrong = next((t for t in values if not is_number(t) or t < 0), None)
    if wrong is not None:
        raise ValueError(f"temperature={wrong!r} must be a number that is not negative; 0 is greedy")
    return [float(t) for t in values]


def _prompt_limit(target: Any, max_tokens: int, asked: int | None) -> int:
    room = target.max_model_len - max_tokens
    if room < 1:
        raise ValueError(f"max_tokens={max_tokens} leaves no room for prompts in {target.name}'s context of "
                         f"{target.max_model_len}")  # fmt: skip
    if asked is None:
        return room
    check_counts(max_prompt_tokens=asked)
    if asked > room:
        raise ValueError(f"max_prompt_tokens={asked} and max_tokens={max_tokens} exceed {target.name}'s "
                         f"context of {target.max_model_len}; use at most max_prompt_tokens={room}")  # fmt: skip
    return asked


def _hash_of(ids: Sequence[Sequence[int]]) -> str:
    found = hashlib.sha256()
    for prompt in ids:
        found.update(np.asarray([len(prompt), *prompt], np.int64).tobytes())
    return found.hexdigest()


def _draw(text: tuple[np.ndarray, int]) -> float:
    """A number in [0, 1) that the prompt alone decides."""
    tokens, prompt_length = text
    digest = hashlib.blake2b(tokens[:prompt_length].astype(np.int32).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.npz"


def _shard_of(prompts: list, answers: list, which: list[int], temperatures: list[float]) -> dict[str, np.ndarray]:
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    return {
        "tokens": np.concatenate([np.asarray(text, np.int32) for text in texts]),
        "offsets": np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64),
        "prompt_lengths": np.asarray([len(prompt) for prompt in prompts], np.int32),
        "prompts": np.asarray(which, np.int64),
        "temperatures": np.asarray(temperatures, np.float32),
    }


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            shard = {name: file[name] for name in file.files}
        whole = len(shard["offsets"]) == len(shard["prompt_lengths"]) + 1 == len(shard["temperatures"]) + 1
        whole = whole and shard["offsets"][-1] == len(shard["tokens"])
    except Exception as error:  # zipfile, zlib and numpy each have errors of their own for damaged files
        raise ValueError(f"{path} cannot be read ({error}); delete it, and it is made again") from None
    if not whole:
        raise ValueError(f"{path} is damaged: its counts do not agree; delete it, and it is made again")
    return shard


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        missing = {"format", "target", "vocab_size", "shards"} - set(manifest)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged ({error}); use another folder") from None
    if missing or manifest["format"] != FORMAT:
        raise ValueError(f"{folder / MANIFEST} is not of format {FORMAT}; use another folder, or make the texts again")
    return manifest


def _open_folder(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Makes the folder, or checks that what it holds was made in the same way."""
    if (folder / MANIFEST).exists():
        found = _read_manifest(folder)
        differing = [name for name in manifest if found.get(name) != manifest[name]]
        if differing:
            what = ", ".join(f"{name} is {found.get(name)!r} there and {manifest[name]!r} here" for name in differing)
            raise ValueError(f"{folder} holds texts that were made in another way: {what}; give another folder, or the "
                             "arguments of the first call")  # fmt: skip
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("shard-*.npz")):
        raise ValueError(f"{folder} holds shards without a {MANIFEST}; give another folder")
    text = json.dumps(manifest, indent=2) + "\n"
    _write(folder / MANIFEST, lambda file: file.write(text.encode()))


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    """Writes under a name of its own and renames, so that no half file bears the name."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
