"""Both drafters of a DeepSeek-V3 target on the real server: Llama's attention and the target's own latent one.

The target has learnt its text, so held-out prompts are worth drafting for. What the server accepts is what the
simulation says of the same answers: no tensor was dropped, renamed, or computed otherwise than it is trained.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.acceptance.definitions import AcceptanceFigure, SpecSettings, summarise
from eagle3.acceptance.simulation import simulate_acceptance
from eagle3.drafter.checkpoint import load_checkpoint
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.client import GenerateRequest
from infra.sglang.launch import DraftServing, ServerConfig
from infra.sglang.server import start_server
from tests.integration.conftest import POINTS
from tests.trained_targets import ANSWER, PROMPT, corpus, greedy, sample, train_deepseek, train_drafter

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS = 3
# A chain may end behind the answer; the simulation counts whole chains, so it has the tokens behind.
SERVED = ANSWER - STEPS + 1
NUM_PROMPTS = 16


@dataclass(frozen=True)
class Learnt:
    target: Target
    model: Any
    texts: list[list[int]]  # held-out prompts and the target's greedy answers


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    target = Target.open(train_deepseek(tmp_path_factory.mktemp("deepseek")))
    model = target.load_model(torch.float32)
    return Learnt(target, model, greedy(model, corpus().prompts(NUM_PROMPTS, seed=7)))


@pytest.mark.parametrize("latent", [False, True], ids=["llama", "latent"])
def test_a_drafter_of_a_deepseek_target_accepts_what_its_simulation_says(
    latent: bool, learnt: Learnt, sglang_settings: Settings, tmp_path: Path
) -> None:
    folder = train_drafter(learnt.target.path, POINTS, tmp_path / "drafter", latent=latent)
    checkpoint = load_checkpoint(folder)
    samples = [sample(learnt.target, learnt.model, ids, POINTS) for ids in learnt.texts]
    simulated = simulate_acceptance(
        checkpoint.drafter, checkpoint.vocab, learnt.target.embedding_table(), samples, num_steps=STEPS
    )
    served = serve(folder, learnt, sglang_settings, tmp_path)
    print(f"simulated {simulated.length:.3f} {simulated.histogram}, served {served.length:.3f} {served.histogram}")
    assert min(simulated.histogram) > 10, "chains must end right, wrong and in between to say something"
    assert served.length > 1.5
    assert abs(served.length - simulated.length) < 0.03


def serve(folder: Path, learnt: Learnt, settings: Settings, logs: Path) -> AcceptanceFigure:
    """What the server counts on the held-out prompts; the text must be the target's whatever the drafter."""
    draft = DraftServing(path=folder, num_steps=STEPS, num_draft_tokens=STEPS + 1)
    config = ServerConfig(
        target=learnt.target.path, device="cpu", draft=draft, max_running_requests=8, max_total_tokens=4096
    )
    requests = [
        GenerateRequest(rid=f"held-out-{i:03d}", input_ids=tuple(ids[:PROMPT]), max_new_tokens=SERVED, ignore_eos=True)
        for i, ids in enumerate(learnt.texts)
    ]
    with start_server(config, settings=settings, log_path=logs / "server.log") as server:
        answers = server.client.generate_many(requests, streams=4)
    assert [list(answer.output_ids) for answer in answers] == [ids[PROMPT : PROMPT + SERVED] for ids in learnt.texts]
    return summarise([answer.counts for answer in answers], SpecSettings.chain(STEPS))
