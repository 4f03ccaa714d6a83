"""The tap beside a drafter: a chain of drafts is captured whole, trees are refused, and a prefix cache makes gaps."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from eagle3.capture import CapturePoint
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.launch import DraftServing, ServerConfig
from infra.sglang.server import SglangServer, start_server
from infra.sglang.staging import read_live, why_missing
from tasks.probe import judge_probe, take_probe
from tests.integration.tap_support import (
    LAYERS_CAPTURED,
    Reference,
    assert_states,
    body,
    last_event,
    load_reference,
    post,
    prompt,
    published,
    staged,
)
from tests.targets import HIDDEN, VOCAB

pytestmark = pytest.mark.integration

PROMPTS = [prompt(length) for length in (9, 30, 47, 70)]
ANSWER = 40


@pytest.fixture(scope="module")
def drafter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter that knows two tokens only, the commonest of the target's answers: some drafts are accepted."""
    target = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    seen: Counter[int] = Counter()
    for ids in PROMPTS:
        answer = target.generate(torch.tensor([ids]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)
        seen.update(answer[0, len(ids) :].tolist())
    vocab = sorted(token for token, _ in seen.most_common(2))
    folder = tmp_path_factory.mktemp("drafter")
    save_file(drafter_tensors(vocab), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(drafter_config(len(vocab))))
    return folder


def drafter_tensors(vocab: list[int]) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return 0.08 * torch.randn(*shape, generator=numbers)

    tensors = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": random(128, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(128, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, 128),
        "lm_head.weight": random(len(vocab), HIDDEN),
        "d2t": torch.tensor(vocab) - torch.arange(len(vocab)),
        "t2d": torch.isin(torch.arange(VOCAB), torch.tensor(vocab)),
        "norm.weight": torch.ones(HIDDEN),
    }
    tensors |= {f"midlayer.self_attn.{name}_proj.weight": random(HIDDEN, 2 * HIDDEN) for name in "qkv"}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    return tensors | {f"midlayer.{name}.weight": torch.ones(HIDDEN) for name in norms}


def drafter_config(draft_vocab: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True},
    }


def serve(config: ServerConfig, staging: Path, folder: Path, settings: Settings) -> SglangServer:
    """A server that drafts with the tap in it. The pipeline starts none, so its interpreter sets the tap's folder."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexport EAGLE3_TAP_DIR="{staging}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    return start_server(config, settings=settings.model_copy(update={"sglang_python": python}), log_path=folder / "log")


def config_of(target: Path, drafter: Path, top_k: int) -> ServerConfig:
    draft = DraftServing(path=drafter, num_steps=2, top_k=top_k, num_draft_tokens=3)
    return ServerConfig(target=target, device="cpu", draft=draft, max_running_requests=4, max_total_tokens=4096)


@pytest.fixture(scope="module")
def hidden_states(tiny_llama: Path) -> Reference:
    return load_reference(tiny_llama)


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain-staging")


@pytest.fixture(scope="module")
def chain(
    tiny_llama: Path, drafter: Path, staging: Path, sglang_settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    with serve(
        config_of(tiny_llama, drafter, 1), staging, tmp_path_factory.mktemp("chain"), sglang_settings
    ) as running:
        yield running


def test_rows_of_accepted_drafts_equal_transformers(
    chain: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    requests = [body(f"chain-{i}", ids, ANSWER) for i, ids in enumerate(PROMPTS)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: post(chain, request), requests))
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 0
    for request, answer in zip(requests, answers, strict=True):
        assert_states(staged(staging, request["rid"]), request["input_ids"], answer["output_ids"], hidden_states)
    assert read_live(staging).layers_to_capture == (2, 4, 6)


def test_rows_that_the_prefix_cache_spared_are_a_gap_that_is_refused(
    chain: SglangServer, staging: Path, hidden_states: Reference
) -> None:
    assert not chain.client.server_info().disable_radix_cache
    ids = prompt(120, seed=5)
    post(chain, body("warm-1", ids, 3, tap=None))
    answer = post(chain, body("hit-1", ids, 3))
    assert answer["meta_info"]["cached_tokens"] > 0
    assert last_event(staging, "hit-1")["event"] == "incomplete"
    assert "prefix cache" in why_missing(staging, "hit-1")
    assert "hit-1" not in published(staging)
    answer = post(chain, body("salted-1", ids, 3, extra_key="tap-salted-1"))  # a cache of its own
    assert_states(staged(staging, "salted-1"), ids, answer["output_ids"], hidden_states)


def test_a_server_that_drafts_can_be_probed_past_its_prefix_cache(
    chain: SglangServer, staging: Path, tiny_llama: Path
) -> None:
    """What an audit of a serving engine needs: the target's own boundaries, a warm cache notwithstanding."""
    target = Target.open(tiny_llama)
    points = (*(CapturePoint(f"layers.{i}") for i in LAYERS_CAPTURED), CapturePoint("norm"))
    for _ in range(2):
        probe = take_probe(chain.client, staging, target, points)
        assert judge_probe(probe, target).verdict == "pass"


def test_a_server_that_drafts_trees_refuses_to_capture(
    tiny_llama: Path, drafter: Path, sglang_settings: Settings, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    with serve(config_of(tiny_llama, drafter, 2), staging, tmp_path, sglang_settings) as tree:
        answer = post(tree, body("tree-1", prompt(20), 10))
        assert len(answer["output_ids"]) == 10
        assert last_event(staging, "tree-1")["event"] == "refused"
        assert "--speculative-eagle-topk" in why_missing(staging, "tree-1")
        assert not published(staging)
