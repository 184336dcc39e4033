"""Speculative decoding in JAX: one compiled decode loop, many drafters, output checked to the bit.

Importing the package is cheap: jax and flax are loaded when a public name is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

# Public name -> module. No module may carry the name of a public function: importing it would replace the function.
_MODULES = {
    "Model": "spec_jax.models.model",
    "SamplingParams": "spec_jax.sampling_params",
    "SpeculativeConfig": "spec_jax.config",
    "TokenHistory": "spec_jax.history",
    "check_exactness": "spec_jax.exactness",
    "enable_compilation_cache": "spec_jax.compilation",
    "generate": "spec_jax.generation",
    "load_model": "spec_jax.models.loading",
    "make_decoder": "spec_jax.generation",
    "stream": "spec_jax.streaming",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module 'spec_jax' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
