"""What every published layout of a drafter is turned into, and the checks that all of them share.

A drafter is for one target: sizes, vocabulary and layers are compared before any tensor is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from spec_jax.drafting.heads import Head
from spec_jax.drafting.tensor_names import EMBEDDING, LM_HEAD
from spec_jax.fields import get
from spec_jax.models.config import LlamaConfig, TensorSpec, fitting_type, from_hf_config

MOST_PADDING = 1024
"""Rows that tables of one vocabulary may differ by: models of a family pad them to different sizes."""
_NEW_PARTS = {
    "kv_a_proj_with_mqa": "multi-head latent attention",
    "q_a_proj": "multi-head latent attention",
    "kv_b_proj": "multi-head latent attention",
    "mlp.experts.": "a mixture of experts",
    "mlp.gate.weight": "a mixture of experts",
    "mlp.shared_expert": "a mixture of experts",
    "linear_attn.": "linear attention",
    ".mixer.": "Nemotron's mixers",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a folder holds.

    Attributes:
      title: whose layout it is, for messages.
      method: of `SpeculativeConfig`.
      head: the description, in float32 and not packed.
      specs: where every weight goes, by its name in the file.
      shapes: of the tensors that belong to the drafter; a target's folder holds others.
      draft_ids: name of the table of the ids that it drafts; None: the target's own.
      offsets: that table holds differences from 0, 1, 2, ... instead of ids.
      member: name of the table that says of every target id whether it is drafted; None: none is there.
      target_rows: the output head is not in the file: it is the target's rows of the ids that are drafted.
      copies: tensors that must be equal to another one, by name; they are read for that alone.
      num_speculative_tokens: how many the publisher says to draft; None: it does not say.
      notes: what a reader of the folder should know.
    """

    title: str
    method: str
    head: Head
    specs: Mapping[str, TensorSpec]
    shapes: Mapping[str, tuple[int, ...]]
    draft_ids: str | None = None
    offsets: bool = True
    member: str | None = None
    target_rows: bool = False
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_speculative_tokens: int | None = None
    notes: tuple[str, ...] = ()


def layers_of(config: Mapping[str, Any], target: Any, **changes: Any) -> LlamaConfig:
    """The transformer layers that a config describes, checked against the target's vocabulary."""
    found = from_hf_config(config)
    rows, ids = target.config.vocab_size, target.vocab_size
    if not ids <= found.vocab_size < rows + MOST_PADDING:
        raise ValueError(
            f"the drafter is for a vocabulary of {found.vocab_size} ids, and {target.name} has {ids} in {rows} rows; "
            f"use a drafter that was trained for this target"
        )
    found = dataclasses.replace(found, tie_embeddings=False, **changes)
    return dataclasses.replace(found, model_type=fitting_type(found))


def rows_of(shapes: Mapping[str, tuple[int, ...]], name: str, default: int = 0) -> int:
    """The first axis of a tensor; `default` where there is none. What else is wrong with it is found later."""
    return (shapes[name] or (0,))[0] if name in shapes else default


def check_target(hidden: int, target: Any) -> None:
    """`hidden`: the size of the target's features, as the drafter's config says."""
    if hidden != target.config.hidden_size:
        raise ValueError(
            f"the drafter reads features of size {hidden}, and those of {target.name} have size "
            f"{target.config.hidden_size}; use a drafter that was trained for this target"
        )


def tables_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: Any) -> dict[str, Any]:
    """The fields of `Head` that say which tables are the drafter's own, with "draft_vocab" for its config."""
    rows = target.config.vocab_size
    drafted = get(config, "draft_vocab_size", int)
    mapped = "d2t" in shapes or (drafted is not None and drafted < target.vocab_size)
    if mapped and drafted is None:
        drafted = rows_of(shapes, "d2t")
    if LM_HEAD in shapes and not mapped and rows_of(shapes, LM_HEAD) != rows:
        raise ValueError(
            f"{LM_HEAD} has {rows_of(shapes, LM_HEAD)} rows and {target.name} {rows}, and no d2t tells which they are"
        )
    own = EMBEDDING in shapes
    embedding_rows = rows_of(shapes, EMBEDDING)
    if own and embedding_rows < target.vocab_size:
        raise ValueError(
            f"{EMBEDDING} has {embedding_rows} rows, fewer than the {target.vocab_size} ids of {target.name}"
        )
    return {
        "own_embedding": own,
        "embedding_rows": embedding_rows,
        "own_head": LM_HEAD in shapes or mapped,
        "mapped": mapped,
        "draft_vocab": drafted if mapped else rows,
    }


def layout_of(
    title: str,
    method: str,
    head: Head,
    specs: Mapping[str, TensorSpec],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> Layout:
    """A layout whose tables have the names of SafeAILab and speculators."""
    rows = head.mapped and LM_HEAD not in shapes
    return Layout(
        title=title,
        method=method,
        head=head,
        specs={name: spec for name, spec in specs.items() if not (rows and name == LM_HEAD)},
        shapes=shapes,
        draft_ids="d2t" if head.mapped else None,
        member="t2d" if "t2d" in shapes else None,
        target_rows=rows,
        num_speculative_tokens=speculative_tokens(config),
    )


def features_of(ids: list[int], first: int, key: str, target: Any) -> tuple[int, ...]:
    """Our numbers of the layers `ids`, counted by the publisher from `first` on."""
    layers = target.config.num_layers
    wrong = [i for i in ids if not first <= i < first + layers]
    if wrong or not ids:
        raise ValueError(
            f"{key}={ids} must be numbers from {first} to {first + layers - 1}, as {target.name} has {layers} layers; "
            f"use a drafter that was trained for this target"
        )
    return tuple(i - first for i in ids)


def check_mask_token(token: int | None, rows: int, keys: str) -> int:
    """The mask token, which must have a row in the embedding; `keys`: what it is called in the config."""
    if token is None:
        raise ValueError(f"config.json lacks {keys}, the id that stands for tokens that are not known yet")
    if not 0 <= token < rows:
        raise ValueError(f"{keys}={token} is outside the {rows} rows of the embedding")
    return token


def speculative_tokens(config: Mapping[str, Any]) -> int | None:
    """How many tokens a config of speculators says to draft."""
    methods = get(get(config, "speculators_config", dict, {}), "proposal_methods", list, [])
    first = methods[0] if methods and isinstance(methods[0], dict) else {}
    return get(first, "speculative_tokens", int)


def refuse_new_parts(names: Iterable[str]) -> None:
    """Raises ValueError for layers of kinds that are not supported."""
    for name in names:
        for part, title in _NEW_PARTS.items():
            if part in name:
                raise ValueError(f"{name}: a drafter layer with {title} is not supported")


def refuse_gated(shapes: Mapping[str, tuple[int, ...]], prefix: str, config: LlamaConfig) -> None:
    """Gated attention (Qwen3-Next) has the gates' rows in q_proj."""
    if rows_of(shapes, f"{prefix}self_attn.q_proj.weight") == 2 * config.num_heads * config.head_dim:
        raise ValueError(f"{prefix}self_attn.q_proj.weight has twice the rows: gated attention is not supported")
