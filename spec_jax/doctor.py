"""What this machine can run and which exactness holds on it: the reports of `spec-jax doctor` and `spec-jax models`."""

from __future__ import annotations

from typing import Any

import spec_jax
from spec_jax import environment, hub

LEVELS = {
    "E2": "text and bits depend neither on drafter, K, width, batch nor prompt bucket",
    "E1": "text and bits are those of plain decoding at the same width, batch shape, dtype and device",
    "E0": "tokens follow the stated rule on the logits of this run; near-ties may fall the other way",
}


def examine(model: str | None = None, dtype: str = "float32") -> dict[str, Any]:
    """Collects the report. Exactness is measured on `model`, or on a small random one so that it takes seconds."""
    target = random_model(dtype) if model is None else spec_jax.load_model(model, dtype=dtype)
    return {
        "versions": environment.versions(),
        "devices": environment.devices(),
        "cores": environment.cpu_cores(),
        "models": known_models(),
        "kernels": kernels(),
        "exactness": measure_exactness(target, dtype),
    }


def known_models() -> list[dict[str, Any]]:
    """The models that `load_model` knows by name, and which of them are in the cache folder already."""
    return [
        {
            "name": name,
            "description": entry.description,
            "licence": entry.licence,
            "bytes": entry.num_bytes,
            "cached": _is_cached(entry),
        }
        for name, entry in hub.HUB.items()
    ]


def _is_cached(entry: hub.HubModel) -> bool:
    path = hub.cache_folder() / entry.file_name
    return path.is_file() and path.stat().st_size == entry.num_bytes


def kernels() -> list[dict[str, Any]]:
    """The kernels and whether they can be used here."""
    from spec_jax.kernels import cpu

    reason = cpu.unavailable()
    platforms = ", ".join(sorted({device["platform"] for device in environment.devices()}))
    return [
        {"name": "CPU kernels", "available": reason is None, "note": reason or "products, norms and attention"},
        {"name": "attention: XLA reference", "available": True, "note": f"runs on {platforms}"},
        {"name": "attention: TPU kernel", "available": "tpu" in platforms, "note": "compiled, but never run on a TPU"},
        {"name": "attention: GPU kernel", "available": False, "note": "not part of this version"},
    ]


def measure_exactness(target: Any, dtype: str) -> dict[str, Any]:
    """Runs `check_exactness` and returns its findings as plain values."""
    found = spec_jax.check_exactness(target)
    return {
        "model": target.name,
        "dtype": dtype,
        "level": found.level,
        "row_block": found.row_block,
        "checks": [
            {
                "name": check.name,
                "level": check.level,
                "passed": bool(check.passed),
                "max_abs_diff": float(check.max_abs_diff),
            }
            for check in found.checks
        ],
    }


def random_model(dtype: str) -> Any:
    """A small Llama with random weights whose products are long enough to show how sums are ordered."""
    from spec_jax.kernels import cpu
    from spec_jax.models.config import LlamaConfig
    from spec_jax.models.llama import Llama, init_params

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        tie_embeddings=True,
    )
    module = Llama(config, dtype, packed=cpu.unavailable() is None)
    return spec_jax.Model(
        module=module,
        params=init_params(module),
        tokenizer=None,
        eos_token_ids=(),
        name="random (3 layers, 192 wide)",
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )


def models_table(entries: list[dict[str, Any]]) -> Any:
    """`known_models` as a `rich` table."""
    table = _table("models", "name", "description", "licence", "size", "cached")
    for entry in entries:
        size, cached = f"{entry['bytes'] / 1e6:.0f} MB", "yes" if entry["cached"] else "no, fetched on use"
        table.add_row(entry["name"], entry["description"], entry["licence"], size, cached)
    return table


def tables(report: dict[str, Any]) -> list[Any]:
    """The report of `examine` as `rich` tables."""
    versions = _table("versions", "package", "version")
    for name, version in report["versions"].items():
        versions.add_row(name, version)
    devices = _table(f"devices ({report['cores']} CPU cores)", "id", "platform", "kind")
    for device in report["devices"]:
        devices.add_row(str(device["id"]), device["platform"], device["kind"])
    kernels_table = _table("kernels", "name", "available", "note")
    for kernel in report["kernels"]:
        kernels_table.add_row(kernel["name"], _yes_no(kernel["available"]), kernel["note"])
    found = report["exactness"]
    block = "rows independent" if found["row_block"] is None else f"row block {found['row_block']}"
    title = f"exactness {found['level']}, {block}, {found['dtype']}, {found['model']}"
    exactness = _table(title, "check", "needed for", "bit-identical", "largest difference")
    exactness.caption = f"{found['level']}: {LEVELS[found['level']]}"
    for check in found["checks"]:
        exactness.add_row(check["name"], check["level"], _yes_no(check["passed"]), f"{check['max_abs_diff']:.3g}")
    return [versions, devices, models_table(report["models"]), kernels_table, exactness]


def _table(title: str, *headings: str) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", caption_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _yes_no(value: bool) -> str:
    return "[green]yes[/]" if value else "[yellow]no[/]"
