"""What the tests of the server share: prompts, requests for them, and the answers that transformers gives."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from infra.sglang.client import GenerateRequest

PROMPTS = ([5, 6, 7, 8], list(range(20, 60)), [300, 301], [77, 88, 99, 111, 122])
NEW_TOKENS = 32


def greedy(target: Path, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[tuple[int, ...]]:
    """Plain greedy decoding by transformers, in float32."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    whole = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        for prompt in prompts
    ]
    return [tuple(ids[0, len(prompt) :].tolist()) for ids, prompt in zip(whole, prompts, strict=True)]


def requests(prefix: str, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[GenerateRequest]:
    return [
        GenerateRequest(rid=f"{prefix}-{i:03d}", input_ids=tuple(prompt), max_new_tokens=new_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
