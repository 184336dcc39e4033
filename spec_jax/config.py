"""`SpeculativeConfig`: which drafter guesses, how far, and how its guesses are verified, checked on creation.

Field names and meanings follow vLLM where it has them. This module imports neither jax nor flax.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from spec_jax.checks import is_int, nearest, plain

METHODS = ("none", "ngram", "draft_model", "layer_skip")
RULES = ("coupled", "standard")
WIDTHS = (4, 8, 16, 32, 64, 128)
DEFAULT_TOKENS = {"none": 0, "ngram": 5, "draft_model": 4, "layer_skip": 4}
AUTO_TOKENS = 7
MAX_LOOKUP = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter guesses, how far, and by which rule its guesses are verified.

    Attributes:
      method: "none" | "ngram" | "draft_model" | "layer_skip".
      num_speculative_tokens: K, draft tokens per step. Default: ngram 5, draft_model 4, layer_skip 4.
      verify_width: rows of one verification step, at least K + 1; None: 8 where K + 1 <= 8, else the next of
        4, 8, 16, 32, 64, 128. "auto": every step verifies as many drafts, up to K, as promise the most tokens per
        second, none included (`spec_jax.draft_length`); K is 7 then unless it is given.
      rejection_sample_method: "coupled" (same seed, same text whatever the drafter) or "standard" (Leviathan et al.,
        https://arxiv.org/abs/2211.17192). None: "standard" where drafts are sampled, else "coupled". At temperature 0
        both are exact greedy decoding.
      draft_sample_method: "greedy" or "probabilistic" (draft_model and layer_skip: sample the draft, keep the true q).
      prompt_lookup_max, prompt_lookup_min: ngram only, longest and shortest suffix looked up. Default 3 and 1.
      model: draft_model only: a hub name, a folder, a .gguf file or a loaded `Model`.
      exit_layer: layer_skip only: draft with the first `exit_layer` layers. Default: a third of the layers.
      draft_layers: layer_skip only: draft with these layers instead of a prefix, ascending ids.
    """

    method: str = "none"
    num_speculative_tokens: int | None = None
    verify_width: int | None = None
    rejection_sample_method: str | None = None
    draft_sample_method: str = "greedy"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    model: Any = None
    exit_layer: int | None = None
    draft_layers: tuple[int, ...] | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is not known{nearest(str(self.method), METHODS)}; "
                             f"known methods: {', '.join(METHODS)}")  # fmt: skip
        k = self.num_speculative_tokens
        if k is None:
            auto = self.verify_width == "auto" and self.method != "none"
            default = AUTO_TOKENS if auto else DEFAULT_TOKENS[self.method]
            object.__setattr__(self, "num_speculative_tokens", default)
        elif not is_int(k) or k < 0:
            raise ValueError(f"num_speculative_tokens={k!r} must be an integer of at least 0 (0 turns drafting off)")
        elif self.method == "none" and k:
            raise ValueError(f"num_speculative_tokens={k} needs a method; method='none' drafts nothing")
        width = self.verify_width
        if width is not None and width != "auto" and (not is_int(width) or width < 1):
            raise ValueError(f"verify_width={width!r} must be a positive integer, 'auto', or None for the default")
        if self.rejection_sample_method is not None and self.rejection_sample_method not in RULES:
            name = self.rejection_sample_method
            raise ValueError(f"rejection_sample_method={name!r} is not known{nearest(str(name), RULES)}; "
                             f"allowed: {', '.join(RULES)}")  # fmt: skip
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise ValueError(f"draft_sample_method={self.draft_sample_method!r} must be 'greedy' or 'probabilistic'")
        owners = {
            "prompt_lookup_max": "ngram", "prompt_lookup_min": "ngram", "model": "draft_model",
            "exit_layer": "layer_skip", "draft_layers": "layer_skip",
        }  # fmt: skip
        for name, owner in owners.items():
            if getattr(self, name) is not None and self.method != owner:
                raise ValueError(f"{name} belongs to method={owner!r}, but method={self.method!r} was asked for")
        if self.draft_sample_method == "probabilistic" and self.method not in ("draft_model", "layer_skip"):
            raise ValueError(f"draft_sample_method='probabilistic' needs a drafter that samples (draft_model, "
                             f"layer_skip); method={self.method!r} proposes deterministically")  # fmt: skip
        if self.method == "ngram":
            longest = self.prompt_lookup_max
            shortest = self.prompt_lookup_min
            longest = longest if longest is not None else max(3, shortest) if is_int(shortest) else 3
            shortest = shortest if shortest is not None else 1
            if not (is_int(longest) and is_int(shortest) and 1 <= shortest <= longest <= MAX_LOOKUP):
                raise ValueError(f"prompt_lookup_min={shortest!r} and prompt_lookup_max={longest!r} must be integers "
                                 f"with 1 <= min <= max <= {MAX_LOOKUP}")  # fmt: skip
            object.__setattr__(self, "prompt_lookup_max", longest)
            object.__setattr__(self, "prompt_lookup_min", shortest)
        if self.method == "draft_model" and self.model is None:
            raise ValueError("method='draft_model' needs 'model': a hub name, a folder, a .gguf file or a loaded Model")
        if self.exit_layer is not None and self.draft_layers is not None:
            raise ValueError("give exit_layer or draft_layers, not both")
        if self.exit_layer is not None and (not is_int(self.exit_layer) or self.exit_layer < 1):
            raise ValueError(f"exit_layer={self.exit_layer!r} must be a positive integer")
        if self.draft_layers is not None:
            layers = self.draft_layers
            ok = isinstance(layers, (list, tuple)) and layers and all(is_int(i) and i >= 0 for i in layers)
            if not ok or list(layers) != sorted(set(layers)):
                raise ValueError(f"draft_layers={layers!r} must be a list of different layer ids in ascending order")
            object.__setattr__(self, "draft_layers", tuple(layers))

    @property
    def rule(self) -> str:
        """The verification rule in force."""
        sampled = self.draft_sample_method == "probabilistic"
        return self.rejection_sample_method or ("standard" if sampled else "coupled")


def parse_speculative_config(value: Any, verify_width: int | str | None = None) -> SpeculativeConfig:
    """Accepts None, a dict, a JSON object as text, or a `SpeculativeConfig`.

    A `verify_width` of "auto" given beside it stands for the key, since the default draft length follows from it.
    """
    if value is None:
        return SpeculativeConfig()
    if isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            hint = f'; write {{"method": "{value}"}}' if value in METHODS else ""
            raise ValueError(f"speculative_config={value!r} is not JSON: {error}{hint}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"speculative_config must be a dict, a JSON object or a SpeculativeConfig, not {value!r}")
    known = [f.name for f in dataclasses.fields(SpeculativeConfig)]
    for name in value:
        if name not in known:
            raise ValueError(f"unknown key {name!r} in speculative_config{nearest(str(name), known)}; "
                             f"known: {', '.join(known)}")  # fmt: skip
    if verify_width == "auto":
        value = {**value, "verify_width": "auto"}
    if "method" not in value:
        raise ValueError(f"speculative_config has no 'method'; known methods: {', '.join(METHODS)}")
    return SpeculativeConfig(**value)


def choose_width(num_nodes: int, verify_width: Any) -> int:
    """The rows of one verification step for `num_nodes` draft nodes (the last committed token takes one more).

    "auto" chooses among narrower steps as it goes; this is its widest.
    """
    if verify_width is None:
        return next((w for w in WIDTHS if w >= max(num_nodes + 1, 8)), num_nodes + 1)
    if verify_width == "auto":
        return num_nodes + 1
    if not is_int(verify_width) or verify_width < 1:
        raise ValueError(f"verify_width={verify_width!r} must be a positive integer, 'auto', or None for the default")
    if verify_width < num_nodes + 1:
        raise ValueError(f"verify_width={verify_width} cannot hold {num_nodes} draft tokens and the last token; "
                         f"give at least {num_nodes + 1} or leave it out")  # fmt: skip
    return verify_width


def auto_widths(width: int) -> tuple[int, ...]:
    """The widths that "auto" compiles where every row of a step costs alike, ascending, at most four."""
    return tuple(dict.fromkeys([1, *(w for w in (4, 8) if w < width), width]))
