"""Whole replays of the story (`tasks.story`), shared by the tests and by `benchmarks/story.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.drafter.checkpoint import Checkpoint, load_checkpoint
from eagle3.evidence.references import TargetReference
from eagle3.prompts import TokenizedPrompt
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.installed import sglang_version
from infra.smollm2 import ensure_smollm2
from tasks.inputs import prompt_parts
from tasks.params import AnswerParams, PromptParams
from tasks.story import FIX, RIGHT, SWAPPED, UP, Replay, Replayed, story
from tests.trained_targets import ANSWER, PROMPT, corpus, greedy

LLAMA_POINTS = ("layers.1", "layers.3", "layers.5")
# In SGLang 0.5.23 [3, 5, 6]; the list of 0.5.12 for them is [2, 4, 5], which does not begin with 1 and so is raw.
DEEPSEEK_POINTS = ("layers.2", "layers.4", "layers.5")
SMOLLM2_PROMPTS = PromptParams()  # the demo's: its drafter was trained on the others of this file
SMOLLM2_ANSWERS = AnswerParams()


@dataclass(frozen=True)
class Played:
    """What was served, by the variant's name, the right one first."""

    checkpoint: Checkpoint
    rows: dict[str, Replayed]
    prompts: int

    @property
    def right(self) -> Replayed:
        return self.rows[RIGHT]


def play_tiny(
    target_folder: Path, drafter: Path, work: Path, *, prompts: int, chosen: Sequence[str] | None = None
) -> Played:
    """A trained tiny target; plain greedy decoding by transformers. `chosen`: names of variants, None for all."""
    settings = Settings(sglang_device="cpu", sglang_start_timeout=400)
    target = Target.open(target_folder)
    model = target.load_model(torch.float32)
    asked = corpus().prompts(prompts, seed=5)
    tokenized = [TokenizedPrompt(id=f"p{number:03d}", input_ids=tuple(ids)) for number, ids in enumerate(asked)]
    expected = {p.id: whole[PROMPT:] for p, whole in zip(tokenized, greedy(model, asked), strict=True)}
    replay = Replay(
        target=target,
        reference=TargetReference(target, model),
        prompts=tokenized,
        max_new_tokens=ANSWER,
        settings=settings,
        work=work,
        ignore_eos=True,
    )
    return _play(replay, drafter, expected, chosen)


def play_smollm2(drafter: Path, work: Path, settings: Settings, *, threads: int = 2) -> Played:
    """SmolLM2 with a drafter of the demo (`<home>/cache/drafters/<digest>`), on the prompts that the demo held out."""
    target = Target.open(ensure_smollm2(settings.root), cache_dir=settings.root / "cache")
    _, heldout = prompt_parts(SMOLLM2_PROMPTS, SMOLLM2_ANSWERS, target)
    replay = Replay(
        target=target,
        reference=TargetReference(target),
        prompts=heldout.prompts,
        max_new_tokens=SMOLLM2_ANSWERS.max_new_tokens,
        settings=settings,
        work=work,
        threads=threads,
    )
    return _play(replay, drafter, replay.plain(), (RIGHT, FIX, UP, SWAPPED))


def _play(
    replay: Replay,
    drafter: Path,
    expected: dict[str, list[int]] | dict[str, tuple[int, ...]],
    chosen: Sequence[str] | None,
) -> Played:
    checkpoint = load_checkpoint(drafter)
    version = sglang_version(replay.settings)
    variants = story(drafter, checkpoint, replay.target, replay.work / "variants", version)
    rows = replay.run(checkpoint, [v for v in variants if chosen is None or v.name in chosen], expected)
    return Played(checkpoint, {row.variant.name: row for row in rows}, len(replay.prompts))
