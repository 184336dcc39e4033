"""A stand-in for loading and decoding, so that tests of the CLI and of `bench` choose every number themselves."""

from types import SimpleNamespace

from spec_jax.metrics import Completion, GenerateResult, Logprob, Stats


class ByteTokenizer:
    """Token ids are UTF-8 bytes."""

    has_chat_template = False

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i % 256 for i in ids).decode(errors="replace")


class FakeStream:
    """The text of a result, character by character."""

    def __init__(self, result):
        self.result, self._whole = None, result

    def __iter__(self):
        yield from self._whole.sequences[0].text
        self.result = self._whole


class FakeCore:
    """Records every call of `generate` and answers it with `output` and the speeds in `tokens_per_second`.

    Attributes:
      finish: fields that every completion gets beside its tokens.
    """

    def __init__(self):
        self.target = SimpleNamespace(
            name="fake", tokenizer=ByteTokenizer(), vocab_size=256, max_model_len=4096, eos_token_ids=(0,)
        )
        self.calls = []
        self.tokens_per_second = {"plain W=1": 20.0, "plain": 10.0}
        self.default_speed = 40.0
        self.output = lambda call: self.target.tokenizer.encode(f"äöü answer to {call.prompts[0]}"[:24])
        self.drafts = lambda call: (4, 16, 7)
        self.finish = {"finish_reason": "length"}

    def load_model(self, name, dtype="float32"):
        if name == "missing":
            raise ValueError("model 'missing' is not known;\nuse one of: fake")
        return self.target

    def stream(self, target, prompt, speculative_config=None, sampling=None, verify_width=None, exact=None):
        result = self.generate(target, [prompt], speculative_config, sampling, verify_width, exact)
        self.calls[-1].streamed = True
        return FakeStream(result)

    def generate(
        self,
        target,
        prompts,
        speculative_config=None,
        sampling=None,
        verify_width=None,
        exact=None,
        max_batch_size=None,
        progress=None,
    ):
        config = speculative_config or {"method": "none"}
        call = SimpleNamespace(
            prompts=prompts,
            config=config,
            sampling=sampling,
            verify_width=verify_width,
            exact=exact,
            max_batch_size=max_batch_size,
            progress=progress,
            streamed=False,
            number=len(self.calls),
        )
        self.calls.append(call)
        call.label = self.label(call)
        plain = call.label.startswith("plain")
        drafts, drafted, accepted = (0, 0, 0) if plain else self.drafts(call)
        ids = self.output(call)
        sequences = [
            Completion(
                token_ids=ids,
                text=target.tokenizer.decode(ids),
                seed=sample,
                accepted=[i % 2 == 1 for i in range(len(ids))],
                prompt_index=index,
                logprobs=None if sampling is None else self.logprobs(ids, sampling.logprobs),
                stats=Stats(num_drafts=drafts, num_cached_tokens=3),
                **self.finish,
            )
            for index in range(len(prompts))
            for sample in range(1 if sampling is None else sampling.n)
        ]
        tokens = sum(len(sequence.token_ids) for sequence in sequences)
        speed = self.tokens_per_second.get(call.label, self.default_speed)
        stats = Stats(
            num_drafts=drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_emitted_tokens=tokens,
            num_cached_tokens=3 * len(sequences),
            near_ties=1,
            compile_seconds=1.0,
            prefill_seconds=0.1,
            decode_seconds=tokens / speed,
        )
        return GenerateResult(sequences=sequences, stats=stats, exactness="E2", verify_width=verify_width or 8)

    @staticmethod
    def logprobs(ids, top):
        """Every token is the second likeliest, behind the letters from A on."""
        if top is None:
            return None
        likely = [ord("A") + i for i in range(top)]
        return [
            {token: Logprob(-1.5, 2)} | {t: Logprob(-0.5 - i, 1 + 2 * i) for i, t in enumerate(likely)} for token in ids
        ]

    @staticmethod
    def label(call):
        if isinstance(call.config, str) or call.config["method"] != "none":
            return call.config if isinstance(call.config, str) else call.config["method"]
        return "plain W=1" if call.verify_width == 1 else "plain"
