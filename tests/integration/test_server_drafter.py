"""Drafting on the real server: the text stays that of the target, and the drafter that runs is the one we saved."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eagle3.acceptance.definitions import AcceptanceFigure, SpecSettings, summarise
from eagle3.acceptance.simulation import simulate_acceptance
from eagle3.capture import CaptureSpec
from eagle3.drafter.checkpoint import CheckpointError, contract_for, load_checkpoint, save_checkpoint
from eagle3.drafter.config import DrafterConfig
from eagle3.drafter.vocab import VocabMap
from eagle3.dump.manifest import TokenizerIdentity
from eagle3.refs import DumpRef
from eagle3.target import Target
from eagle3.training.config import TrainingConfig
from eagle3.training.loop import train
from eagle3.training.samples import TargetParts, TrainingSample
from infra.settings import Settings
from infra.sglang.client import Generated, ServerInfo
from infra.sglang.launch import DraftServing, ServerConfig
from infra.sglang.server import start_server
from tests.dumps import identity_of
from tests.integration.conftest import POINTS, capture_ids
from tests.integration.server_support import NEW_TOKENS, PROMPTS, greedy, requests
from tests.integration.tap_support import LAYERS_CAPTURED, Reference, load_reference, prompt
from tests.successors import make_successor_drafter, make_successor_target

pytestmark = pytest.mark.integration

STEPS = 3
LONG = 80  # tokens of an answer
RECIPE = TrainingConfig(budget=150, budget_unit="steps", batch_size=6, learning_rate=1e-2, bf16=False)


def test_drafting_in_trees_gives_the_text_of_plain_greedy_decoding(sglang_settings: Settings, tmp_path: Path) -> None:
    target = make_successor_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    draft = DraftServing(path=make_successor_drafter(tmp_path / "drafter", model), top_k=2, num_draft_tokens=6)
    answers, info = serve(target, draft, sglang_settings, tmp_path, PROMPTS, NEW_TOKENS)
    assert [answer.output_ids for answer in answers] == greedy(target, PROMPTS)
    assert (info.speculative_algorithm, info.speculative_num_steps) == ("EAGLE3", STEPS)
    assert info.speculative_draft_model_path == str(draft.path)
    settings = SpecSettings(num_steps=STEPS, top_k=2, num_draft_tokens=6)
    assert summarise([answer.counts for answer in answers], settings).num_requests == len(PROMPTS)
    for counts in (answer.counts for answer in answers):
        assert counts.correct > 0
        # The prefill gives the first token; a verification gives its accepted drafts and one more, the last is cut.
        assert 0 <= 1 + counts.verifications + counts.correct - NEW_TOKENS < STEPS


@dataclass(frozen=True)
class Saved:
    """A checkpoint of ours and what the simulation says of it, on the answers that the server will give."""

    folder: Path
    prompts: list[list[int]]
    answers: list[tuple[int, ...]]
    simulated: AcceptanceFigure


@pytest.fixture(scope="module")
def saved(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A drafter that our trainer lets learn the very answers by heart, so that many of its drafts are right."""
    prompts = [prompt(length, seed=11) for length in (9, 30, 47, 70, 12, 25)]
    # A chain may end behind the answer; the simulation counts whole chains, so it is given the tokens behind.
    texts = greedy(tiny_llama, prompts, LONG + STEPS - 1)
    target = Target.open(tiny_llama)
    vocab = VocabMap(torch.tensor(sorted({token for text in texts for token in text})), target.vocab_size)
    parts = replace(TargetParts.of(target), last_layer=None)
    shape = DrafterConfig.like_target(target, num_slots=len(POINTS), draft_vocab_size=len(vocab))
    states = load_reference(tiny_llama)
    samples = [sample(ids, text, states) for ids, text in zip(prompts, texts, strict=True)]
    drafter = train(samples, [], parts, shape, vocab, RECIPE).drafter
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    contract = contract_for(
        drafter,
        vocab,
        capture=CaptureSpec(aux=POINTS),
        target=identity_of(tiny_llama),
        tokenizer=TokenizerIdentity(sha256="c" * 64),
        dump=DumpRef(uri="s3://eagle3/dumps/made-up", sha256="d" * 64),
        report_sha256="e" * 64,
    )
    save_checkpoint(folder, drafter, vocab, contract, capture_ids(target.model_class))
    simulated = simulate_acceptance(drafter, vocab, parts.embedding, samples, num_steps=STEPS)
    return Saved(folder, prompts, [text[:LONG] for text in texts], simulated)


def sample(ids: list[int], text: tuple[int, ...], states: Reference) -> TrainingSample:
    whole = [*ids, *text]
    reached = states(whole[:-1])
    return TrainingSample(
        id=f"answer-{len(ids)}",
        input_ids=torch.tensor(whole),
        aux=torch.cat([reached[layer + 1] for layer in LAYERS_CAPTURED], dim=-1),
        final=reached[-1],
        loss_mask=torch.arange(len(whole)) >= len(ids),
    )


def served_acceptance(saved: Saved, folder: Path, target: Path, settings: Settings, log: Path) -> AcceptanceFigure:
    """What the server counts on the same prompts; the text must be the target's whatever the drafter."""
    draft = DraftServing(path=folder, num_steps=STEPS, num_draft_tokens=STEPS + 1)
    answers, _ = serve(target, draft, settings, log, saved.prompts, LONG)
    assert [answer.output_ids for answer in answers] == saved.answers
    return summarise([answer.counts for answer in answers], SpecSettings.chain(STEPS))


def test_a_saved_drafter_accepts_when_served_what_its_simulation_says(
    saved: Saved, tiny_llama: Path, sglang_settings: Settings, tmp_path: Path
) -> None:
    """Every count of every request: no tensor was dropped, renamed or used otherwise than we train it."""
    assert min(saved.simulated.histogram) > 20, "chains must end right, wrong and in between to say something"
    assert served_acceptance(saved, saved.folder, tiny_llama, sglang_settings, tmp_path) == saved.simulated


def test_a_renamed_tensor_is_named_by_us_and_dropped_by_the_server_in_silence(
    saved: Saved, tiny_llama: Path, sglang_settings: Settings, tmp_path: Path
) -> None:
    """What the comparison with the simulation is for: SGLang serves on, with an `fc` that nobody trained."""
    damaged = tmp_path / "damaged"
    shutil.copytree(saved.folder, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["fc_proj.weight"] = tensors.pop("fc.weight")
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing fc.weight .*renamed\? fc_proj.weight"):
        load_checkpoint(damaged)
    served = served_acceptance(saved, damaged, tiny_llama, sglang_settings, tmp_path)
    assert served.length < saved.simulated.length - 0.5


def serve(
    target: Path,
    draft: DraftServing,
    settings: Settings,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> tuple[list[Generated], ServerInfo]:
    config = ServerConfig(target=target, device="cpu", draft=draft, max_running_requests=4, max_total_tokens=4096)
    with start_server(config, settings=settings, log_path=folder / "server.log") as server:
        answers = server.client.generate_many(requests("draft", prompts, new_tokens), streams=4)
        return answers, server.client.server_info()
