"""Does our greedy text agree with `transformers` on the same float32 weights, up to near-ties?

Command:   python experiments/transformers_agreement.py --prompts PROMPTS.jsonl [PROMPTS.jsonl ...] --count 20
           (needs the extra `peers`: pip install -e '.[peers]')
Hardware:  any; about 4 minutes on 2 CPU cores for 20 prompts of 64 tokens
Expected:  every prompt "equal", or a first difference where transformers' own top-2 gap is below 1e-3.

The model is built inside transformers from the parameters that spec_jax loaded, so that nothing but the code differs.
Speculative decoding (prompt lookup) is compared, which by E2 is the same text as plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

import spec_jax
from spec_jax.models.config import tensor_specs
from spec_jax.models.packing import unpack_params
from spec_jax.prompts import read_prompts

NEAR_TIE = 1e-3


def transformers_model(target):
    """The target as a float32 `LlamaForCausalLM`, from our own parameters."""
    import torch
    import transformers

    c = target.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tie_embeddings,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    params = unpack_params(target.params, c) if target.module.packed else target.params
    for name, spec in tensor_specs(c).items():
        array = params
        for part in spec.path:
            array = array[part]
        array = np.asarray(array, np.float32)
        state[name] = torch.from_numpy(np.array(array.T if spec.transpose else array))  # a copy, which torch may write
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"parameters do not fit transformers' model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def compare(model, prompt: list[int], ours: list[int]) -> dict:
    """Teacher-forces our text through transformers and finds the first token it would not have chosen."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1].numpy()
    chosen = logits.argmax(-1)
    differs = np.nonzero(chosen != np.asarray(ours))[0]
    if not len(differs):
        return {"equal": True, "tokens": len(ours)}
    at = int(differs[0])
    best = np.sort(logits[at])[::-1]
    return {"equal": False, "tokens": len(ours), "first_difference": at, "top2_gap": float(best[0] - best[1])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts")
    parser.add_argument("--count", type=int, default=20, help="prompts in all, spread over the files")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    target = spec_jax.load_model(arguments.model)
    model = transformers_model(target)
    per_file = -(-arguments.count // len(arguments.prompts))
    prompts = [p for path in arguments.prompts for p in read_prompts(path)[:per_file]][: arguments.count]
    params = spec_jax.SamplingParams(max_tokens=arguments.max_tokens)
    explained = 0
    for index, prompt in enumerate(prompts):
        ids = target.tokenizer.apply_chat_template(prompt.messages)
        result = spec_jax.generate(target, [ids], {"method": "ngram"}, params)
        line = compare(model, ids, result.sequences[0].token_ids)
        explained += line["equal"] or line["top2_gap"] < NEAR_TIE
        print(json.dumps({"prompt": index, "prompt_tokens": len(ids), **line}), flush=True)
    print(f"{explained} of {len(prompts)} prompts agree up to near-ties (gap < {NEAR_TIE})")
    sys.exit(explained != len(prompts))


if __name__ == "__main__":
    main()
