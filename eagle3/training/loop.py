"""Training a drafter: what goes in, what comes out."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3.acceptance.definitions import AcceptanceFigure
from eagle3.capture import CapturePoint
from eagle3.digests import sha256_json
from eagle3.drafter.config import DrafterConfig
from eagle3.drafter.mla import build_drafter
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMap
from eagle3.dump.prefetch import Prefetch
from eagle3.training.config import RESUME_MAY_CHANGE, TrainingConfig
from eagle3.training.draws import Drawing, full_shuffle
from eagle3.training.initialise import initialise, sha256_weights, take_weights
from eagle3.training.loss import valid_states
from eagle3.training.parallel import processes
from eagle3.training.run import Progress, Run
from eagle3.training.samples import (
    NORM,
    TargetParts,
    TrainingError,
    TrainingSample,
    check_final_point,
    check_parts,
    check_sample,
)
from eagle3.training.trainer import StepRecord, Trainer


@dataclass(frozen=True)
class TrainResult:
    """A trained drafter (on the CPU, frozen) and how it came about."""

    drafter: Drafter
    vocab: VocabMap
    metrics: dict[str, float]
    history: tuple[StepRecord, ...]
    acceptance: AcceptanceFigure | None  # simulated on the held-out samples; None without any
    warm_started: tuple[str, ...]  # parameters that began as the target's


def train(
    samples: Sequence[TrainingSample],
    heldout: Sequence[TrainingSample],
    parts: TargetParts,
    drafter_config: DrafterConfig,
    vocab: VocabMap,
    config: TrainingConfig,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    final: CapturePoint = NORM,
    device: torch.device | str = "cpu",
    order: Drawing | None = None,
    read_ahead: int = 0,
    states: Path | None = None,
    parent: Mapping[str, Tensor] | None = None,
) -> TrainResult:
    """Train a drafter on captured samples.

    `samples` may be lazy (read from disk on access); `final` is the point where their final states were captured.
    `order` draws from the places in `samples` that have a token to learn; by default every epoch is a new shuffle.
    `read_ahead` steps are read by a thread while others are trained on: it changes no result. With `heldout` the
    metrics hold the simulated acceptance before and after, and the loss per step; the drafter is the best that was
    evaluated. `states` is a folder for states on disk: a training that was killed goes on from the newest, and on the
    CPU ends with the same bits. `parent`: weights to start from, by the checkpoint's names, in the place of the first
    weights. Under torchrun each process calls this with the same arguments and gets the same result.

    Raises TrainingError for samples or parts that do not fit or hold NaN, where no token is under the loss mask, where
    the loss explodes, for a state of another training and where a state cannot be written.
    """
    check_final_point(parts, final)
    check_parts(parts, drafter_config)
    if len(vocab) != drafter_config.draft_vocab_size or vocab.target_vocab_size != drafter_config.target_vocab_size:
        raise TrainingError(
            f"the vocabulary map is {len(vocab)} of {vocab.target_vocab_size} tokens, the drafter is shaped for "
            f"{drafter_config.draft_vocab_size} of {drafter_config.target_vocab_size}"
        )
    device = torch.device(device)
    with processes(device) as among:
        report = on_progress if on_progress and among.first else lambda _: None
        started, parts = time.perf_counter(), parts.to(device)
        valid = _prepare([samples, heldout], parts, drafter_config, vocab, config, final, report, read_ahead)
        trainable = [i for i, v in enumerate(valid[0].masks) if bool(v.any())]
        if not trainable:
            raise TrainingError(
                f"none of the {len(samples)} samples has a token to learn: nothing is under their loss masks that the "
                "draft vocabulary holds. Check the prompts' answers and the vocabulary map"
            )
        drafter = build_drafter(drafter_config)
        generator = torch.Generator().manual_seed(config.seed)
        warm_started = initialise(drafter, vocab, parts, warm_start=config.warm_start, generator=generator)
        if parent is not None:
            take_weights(drafter, parent)
        first_weights = sha256_weights(drafter)
        trainer = Trainer(drafter.to(device), parts, vocab, config, final, among)
        drawing = order or full_shuffle(valid[0].ids, config.seed)
        total = config.gradient_accumulation
        streams = [drawing(trainable, stream, total) for stream in among.streams(total)]
        run = Run(
            trainer, samples, valid[0].masks, heldout, vocab, states,
            sha256_json([
                config.model_dump(mode="json", exclude=set(RESUME_MAY_CHANGE)), drafter_config.model_dump(mode="json"),
                vocab.digest(), first_weights, streams[0].order.digest, valid[0].ids, valid[1].ids,
            ]),
        )  # fmt: skip
        prepared = time.perf_counter() - started
        history = run.go(streams, report, read_ahead)
        report(Progress("evaluate", 0.0, None, step=trainer.step))
        result = run.best_drafter(build_drafter(drafter_config))
        metrics = {
            "samples": float(len(samples)),
            "samples_without_rows": float(len(samples) - len(trainable)),
            "prepare_seconds": prepared,
            **run.metrics(),
            **(trainer.evaluate(heldout, valid[1].masks, result) if heldout else {}),
        }
        report(Progress("evaluate", 1.0, 0.0, step=trainer.step))
    result.cpu().requires_grad_(False)
    return TrainResult(result, vocab, metrics, tuple(history), run.best, warm_started)


@dataclass
class _Prepared:
    """The samples' ids, and which of their states are trained on."""

    ids: list[str]
    masks: list[Tensor]


def _prepare(
    sets: Sequence[Sequence[TrainingSample]],
    parts: TargetParts,
    drafter_config: DrafterConfig,
    vocab: VocabMap,
    config: TrainingConfig,
    final: CapturePoint,
    report: Callable[[Progress], None],
    read_ahead: int,
) -> list[_Prepared]:
    """Check every sample, and find its valid states once: the full-vocabulary head is the dearest part of a step."""
    total, done, started = sum(len(s) for s in sets), 0, time.perf_counter()
    found = [_Prepared([], []) for _ in sets]
    for number, samples in enumerate(sets):
        with Prefetch((samples[index] for index in range(len(samples))), read_ahead) as ready:
            for sample in ready:
                check_sample(sample, drafter_config, max(config.num_unroll_steps, config.num_draft_steps))
                found[number].ids.append(sample.id)
                found[number].masks.append(valid_states(sample, parts, vocab, final))
                done += 1
                left = (time.perf_counter() - started) / done * (total - done)
                report(Progress("prepare", done / total, left))
    return found
