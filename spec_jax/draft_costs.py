"""What drafting costs: each drafter family as the passes that it makes, on the same roofline as the target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from spec_jax.devices import Device
from spec_jax.model_costs import ModelCosts
from spec_jax.roofline import Load, step_time

SEQUENTIAL, BLOCK, HEADS = "sequential", "block", "heads"
EAGLE3_VOCABULARY = 32000
"""Tokens that published EAGLE-3 drafters choose from."""
DFLASH_LAYERS = 5
"""Layers, and captured layers of the target, of published DFlash drafters."""


@dataclasses.dataclass(frozen=True)
class DraftCosts:
    """One drafter.

    Attributes:
      name: for tables.
      costs: of one pass; None where drafting reads no weights.
      passes: SEQUENTIAL: one pass of one token per draft token. BLOCK: one pass over the last token and all draft
        tokens. HEADS: one head per draft token behind the target's own features.
      relative: seconds per draft token as a share of the target's plain step, instead of `costs`.
      shared_parameters: of `costs`, those that are the target's own.
    """

    name: str
    costs: ModelCosts | None = None
    passes: str = SEQUENTIAL
    relative: float = 0.0
    shared_parameters: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.relative) and self.relative >= 0):
            raise ValueError(f"draft cost {self.relative!r} must be 0 or more, a share of the target's step")

    def seconds(self, device: Device, load: Load, length: int, plain_seconds: float, branch: int = 1) -> float:
        """Of drafting `length` tokens for every sequence; `plain_seconds` is the target's plain step.

        Of a tree, `length` counts the levels, and a SEQUENTIAL drafter extends `branch` nodes in every pass.
        """
        if length == 0:
            return 0.0
        if self.costs is None:
            return length * self.relative * plain_seconds
        if self.passes == SEQUENTIAL:
            return length * step_time(device, self.costs, load, branch).seconds
        if self.passes == BLOCK:
            return step_time(device, self.costs, load, length + 1).seconds
        heads = dataclasses.replace(self.costs, head_parameters=length * self.costs.head_parameters)
        return step_time(device, heads, load, 1).seconds

    def parameter_bytes(self, length: int) -> float:
        """Of the parameters that a drafter of `length` tokens adds to the target's."""
        if self.costs is None:
            return 0.0
        copies = length if self.passes == HEADS else 1
        return copies * (self.costs.parameters - self.shared_parameters) * self.costs.weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return 0.0 if self.costs is None else self.costs.num_layers * self.costs.kv_values * self.costs.kv_bytes


def lookup() -> DraftCosts:
    """N-gram and suffix lookup: no weights, and a search that is not worth counting."""
    return DraftCosts("lookup")


def relative(c: float) -> DraftCosts:
    """A drafter of which only Leviathan's c is known: time per draft token over the target's step."""
    return DraftCosts(f"c={c:g}", relative=c)


def draft_model(costs: ModelCosts) -> DraftCosts:
    """A smaller model of its own."""
    return DraftCosts("draft model", costs)


def layer_skip(target: ModelCosts, layers: int) -> DraftCosts:
    """The target's own first layers and its head, on the target's own cache."""
    if not 1 <= layers <= target.num_layers:
        raise ValueError(f"layers={layers!r} must be from 1 to the target's {target.num_layers}")
    costs = _layers(target, layers)
    return DraftCosts(f"layer skip, {layers} layers", costs, shared_parameters=costs.parameters)


def eagle(target: ModelCosts) -> DraftCosts:
    """EAGLE 1 and 2: one layer behind a projection of feature and embedding, with the target's head."""
    costs = _layers(target, 1, extra=2 * target.hidden_size**2)
    return DraftCosts("EAGLE", costs, shared_parameters=costs.head_parameters)


def eagle3(target: ModelCosts) -> DraftCosts:
    """EAGLE-3: one layer that reads twice the width, a projection of three features, a head of its own vocabulary."""
    d = target.hidden_size
    costs = _layers(target, 1, extra=3 * d * d + target.score_size * d * target.kv_heads * (target.query_group + 2))
    head = min(EAGLE3_VOCABULARY, target.vocab_size) * d
    return DraftCosts("EAGLE-3", dataclasses.replace(costs, head_parameters=head))


def mtp(target: ModelCosts) -> DraftCosts:
    """One multi-token-prediction layer, applied again and again, with the target's head."""
    return dataclasses.replace(eagle(target), name="MTP")


def medusa(target: ModelCosts) -> DraftCosts:
    """Medusa: per draft token a residual block and a head of its own on the target's last features."""
    d = target.hidden_size
    costs = dataclasses.replace(
        target,
        num_layers=0,
        layer_parameters=0,
        head_parameters=d * d + d * target.vocab_size,
        embedding_parameters=0,
        experts=None,
        windows=(0, 0),
    )
    return DraftCosts("Medusa", costs, HEADS)


def hydra(target: ModelCosts) -> DraftCosts:
    """Hydra: one head after another, each reading the tokens drafted so far: an MLP of four layers and a head."""
    d = target.hidden_size
    costs = dataclasses.replace(medusa(target).costs, head_parameters=5 * d * d + d * target.vocab_size)
    return DraftCosts("Hydra", costs)


def dflash(target: ModelCosts) -> DraftCosts:
    """DFlash: one pass of five layers over the whole block, with the target's head."""
    costs = _layers(target, DFLASH_LAYERS, extra=DFLASH_LAYERS * target.hidden_size**2)
    return DraftCosts("DFlash", costs, BLOCK, shared_parameters=costs.head_parameters)


FAMILIES: Mapping[str, object] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "mtp": mtp,
    "medusa": medusa,
    "hydra": hydra,
    "dflash": dflash,
}
LOOKUP = "lookup"
NAMES = (LOOKUP, "c=X", "layer_skip:N", *FAMILIES)
"""What `find_drafter` knows; X and N stand for numbers."""


def find_drafter(name: str, target: ModelCosts | None) -> DraftCosts:
    """The drafter of that name: `lookup`, `c=0.05`, `layer_skip:N` or one of `FAMILIES`. ValueError names them."""
    if name == LOOKUP:
        return lookup()
    kind, separator, value = name.partition("=" if name.startswith("c=") else ":")
    try:
        if kind == "c" and separator == "=":
            return relative(float(value))
        layers = int(value) if kind == "layer_skip" else 0
    except ValueError:
        raise ValueError(f"drafter={name!r} needs a number after {kind}{separator or ':'}") from None
    if kind == "layer_skip":
        return layer_skip(target, layers)
    if name not in FAMILIES:
        allowed = ", ".join(NAMES)
        raise ValueError(f"drafter={name!r} is not known; allowed: {allowed}, or the config.json of a draft model")
    return FAMILIES[name](target)


def _layers(target: ModelCosts, layers: int, extra: int = 0) -> ModelCosts:
    """`layers` dense layers like the target's (without routed experts), `extra` parameters, and the target's head."""
    windowed, window = target.windows
    return dataclasses.replace(
        target,
        num_layers=layers,
        layer_parameters=layers * target.layer_parameters // target.num_layers + extra,
        embedding_parameters=0,
        experts=None,
        windows=(layers if windowed == target.num_layers else 0, window),
    )
