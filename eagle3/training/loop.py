"""The training loop."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal

import torch
from torch import Tensor

from eagle3.acceptance.definitions import AcceptanceFigure
from eagle3.acceptance.simulation import simulate_acceptance
from eagle3.capture import CapturePoint
from eagle3.drafter.config import DrafterConfig
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMap
from eagle3.dump.prefetch import Prefetch
from eagle3.training.config import TrainingConfig
from eagle3.training.initialise import initialise
from eagle3.training.loss import StepMetrics, training_batch, unroll_loss, valid_states
from eagle3.training.samples import (
    NORM,
    TargetParts,
    TrainingError,
    TrainingSample,
    check_final_point,
    check_parts,
    check_sample,
)

_LOWEST_RATE = 0.02  # of the peak learning rate, at the end of the cosine


@dataclass(frozen=True)
class Progress:
    """Where the training stands. `fraction` is of the stage; figures that a stage does not have are None or empty."""

    stage: Literal["prepare", "train", "evaluate"]
    fraction: float
    seconds_left: float | None
    step: int = 0
    loss: float | None = None
    top1: tuple[float, ...] = ()  # per unroll step
    rows_per_second: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """A line of the training's history."""

    step: int
    fraction: float
    seconds: float
    learning_rate: float
    gradient_norm: float
    loss: float
    steps: tuple[StepMetrics, ...]  # per unroll step


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
    order: Callable[[Sequence[int]], Iterator[int]] | None = None,
    read_ahead: int = 0,
) -> TrainResult:
    """Train a drafter on captured samples.

    `samples` may be lazy (read from disk on access); `final` is the point where their final states were captured.
    `order(places)` draws endlessly from the places in `samples` that have a token to learn; by default every epoch is a
    new shuffle. `read_ahead` batches are read by a thread while others are trained on: it changes no result. With
    `heldout` the metrics hold the simulated acceptance before and after, and the loss per step. Raises TrainingError
    for samples or parts that do not fit or hold NaN, where no token is under the loss mask, or where the loss explodes.
    """
    report = on_progress or (lambda _: None)
    check_final_point(parts, final)
    check_parts(parts, drafter_config)
    if len(vocab) != drafter_config.draft_vocab_size or vocab.target_vocab_size != drafter_config.target_vocab_size:
        raise TrainingError(
            f"the vocabulary map is {len(vocab)} of {vocab.target_vocab_size} tokens, the drafter is shaped for "
            f"{drafter_config.draft_vocab_size} of {drafter_config.target_vocab_size}"
        )
    started = time.perf_counter()
    parts = parts.to(torch.device(device))
    valid = _prepare([samples, heldout], parts, drafter_config, vocab, config, final, report, read_ahead)
    trainable = [i for i, v in enumerate(valid[0]) if bool(v.any())]
    if not trainable:
        raise TrainingError(
            f"none of the {len(samples)} samples has a token to learn: nothing is under their loss masks that the "
            "draft vocabulary holds. Check the prompts' answers and the vocabulary map"
        )

    generator = torch.Generator().manual_seed(config.seed)
    drafter = Drafter(drafter_config)
    warm_started = initialise(drafter, vocab, parts, warm_start=config.warm_start, generator=generator)
    drafter.to(device)
    trainer = _Trainer(drafter, parts, vocab, config, final)
    metrics = {
        "samples": float(len(samples)),
        "samples_without_rows": float(len(samples) - len(trainable)),
        "prepare_seconds": time.perf_counter() - started,
    }

    if heldout:
        before = simulate_acceptance(drafter, vocab, parts.embedding, heldout, num_steps=config.num_draft_steps)
        metrics["heldout_acceptance_length_before"] = before.length
    draws = order(trainable) if order is not None else _shuffled(trainable, generator)
    history = trainer.run(samples, valid[0], draws, report, read_ahead)
    metrics |= trainer.totals()

    acceptance = None
    if heldout:
        report(Progress("evaluate", 0.0, None, step=trainer.step))
        acceptance = simulate_acceptance(drafter, vocab, parts.embedding, heldout, num_steps=config.num_draft_steps)
        metrics["heldout_acceptance_length"] = acceptance.length
        metrics["heldout_acceptance_rate"] = acceptance.rate
        metrics |= trainer.evaluate(heldout, valid[1])
        report(Progress("evaluate", 1.0, 0.0, step=trainer.step))
    drafter.cpu().requires_grad_(False)
    return TrainResult(drafter, vocab, metrics, tuple(history), acceptance, warm_started)


def _prepare(
    sets: Sequence[Sequence[TrainingSample]],
    parts: TargetParts,
    drafter_config: DrafterConfig,
    vocab: VocabMap,
    config: TrainingConfig,
    final: CapturePoint,
    report: Callable[[Progress], None],
    read_ahead: int,
) -> list[list[Tensor]]:
    """Check every sample, and find its valid states once: the full-vocabulary head is the dearest part of a step."""
    total, done, started = sum(len(s) for s in sets), 0, time.perf_counter()
    valid: list[list[Tensor]] = [[] for _ in sets]
    for number, samples in enumerate(sets):
        with Prefetch((samples[index] for index in range(len(samples))), read_ahead) as ready:
            for sample in ready:
                check_sample(sample, drafter_config, max(config.num_unroll_steps, config.num_draft_steps))
                valid[number].append(valid_states(sample, parts, vocab, final))
                done += 1
                left = (time.perf_counter() - started) / done * (total - done)
                report(Progress("prepare", done / total, left))
    return valid


class _Trainer:
    """Drafter, optimiser and clocks of one training."""

    def __init__(
        self,
        drafter: Drafter,
        parts: TargetParts,
        vocab: VocabMap,
        config: TrainingConfig,
        final: CapturePoint,
    ) -> None:
        self.drafter, self.parts, self.config, self.final = drafter, parts, config, final
        self.device = parts.embedding.device
        self.draft_head = parts.head[vocab.target_ids.to(self.device)].float()
        rest = [p for name, p in drafter.named_parameters() if name != "lm_head.weight"]
        rate = config.learning_rate
        groups = [
            {"params": rest, "lr": rate},
            {"params": [drafter.lm_head.weight], "lr": rate * config.head_learning_rate_scale},
        ]
        self.peak_rates = [rate, rate * config.head_learning_rate_scale]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
        self.step, self.rows, self.seconds, self.cpu_seconds = 0, 0, 0.0, 0.0

    def run(
        self,
        samples: Sequence[TrainingSample],
        valid: Sequence[Tensor],
        draws: Iterator[int],
        report: Callable[[Progress], None],
        read_ahead: int,
    ) -> list[StepRecord]:
        """Train until the budget is spent, at least one step."""
        history: list[StepRecord] = []
        clock, cpu_clock = time.perf_counter(), time.process_time()
        fraction = 0.0
        batches = ([(i, samples[i]) for i in islice(draws, self.config.batch_size)] for _ in count())
        with Prefetch(batches, read_ahead) as ready:
            for batch in ready:
                log = self.step % self.config.log_every == 0
                record = self._step([sample for _, sample in batch], [valid[i] for i, _ in batch], fraction, log)
                self.seconds, self.cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu_clock
                fraction = self._spent() / self.config.budget
                if record is not None:
                    history.append(record)
                    left = self.seconds * (1 - fraction) / fraction if fraction < 1 else 0.0
                    report(self._progress(record, fraction, left))
                if fraction >= 1:
                    break
        report(Progress("train", 1.0, 0.0, self.step))
        return history

    def _progress(self, record: StepRecord, fraction: float, left: float) -> Progress:
        top1 = tuple(m.top1 for m in record.steps)
        return Progress("train", min(1.0, fraction), left, self.step, record.loss, top1, self.rows / self.seconds)

    def totals(self) -> dict[str, float]:
        return {
            "steps": float(self.step),
            "rows": float(self.rows),
            "train_seconds": self.seconds,
            "train_cpu_seconds": self.cpu_seconds,
            "rows_per_second": self.rows / self.seconds,
        }

    @torch.no_grad()
    def evaluate(self, heldout: Sequence[TrainingSample], valid: Sequence[Tensor]) -> dict[str, float]:
        """Held-out figures per unroll step, each row weighing the same."""
        sums = [[0.0, 0.0, 0.0, 0.0] for _ in range(self.config.num_unroll_steps)]
        trainable = [i for i, v in enumerate(valid) if bool(v.any())]
        for first in range(0, len(trainable), 8):
            chosen = trainable[first : first + 8]
            with self._autocast():
                _, steps = self._loss([heldout[i] for i in chosen], [valid[i] for i in chosen], with_metrics=True)
            for total, m in zip(sums, steps, strict=True):
                total[0] += m.rows
                for place, value in enumerate((m.loss, m.top1, m.acceptance), start=1):
                    total[place] += value * m.rows
        metrics = {}
        for k, (rows, *values) in enumerate(sums, start=1):
            for name, value in zip(("loss", "top1", "acceptance"), values, strict=True):
                metrics[f"heldout_{name}_step{k}"] = value / max(1.0, rows)
        return metrics

    def _step(
        self, samples: Sequence[TrainingSample], valid: Sequence[Tensor], fraction: float, log: bool
    ) -> StepRecord | None:
        scale = self._schedule(fraction)
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * scale
        with self._autocast():
            loss, steps = self._loss(samples, valid, with_metrics=log)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip_norm)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise TrainingError(
                f"step {self.step + 1}: the loss is {loss.item()} and the gradient's norm {norm.item()}, with samples "
                f"{', '.join(s.id for s in samples)}. Their states are finite, so lower the learning rate (now "
                f"{self.config.learning_rate}) or lengthen the warm-up"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.rows += sum(s.num_rows for s in samples)
        if not log:
            return None
        rate = self.config.learning_rate * scale
        return StepRecord(self.step, fraction, self.seconds, rate, norm.item(), loss.item(), tuple(steps))

    def _loss(
        self, samples: Sequence[TrainingSample], valid: Sequence[Tensor], *, with_metrics: bool
    ) -> tuple[Tensor, list[StepMetrics]]:
        num_steps = self.config.num_unroll_steps
        batch, targets = training_batch(samples, valid, self.parts, self.final, num_steps)
        return unroll_loss(
            self.drafter,
            self.parts.embedding,
            self.draft_head,
            batch.to(self.device),
            targets.to(self.device),
            num_steps=num_steps,
            decay=self.config.step_decay,
            with_metrics=with_metrics,
        )

    def _schedule(self, fraction: float) -> float:
        """Linear warm-up over steps, then a cosine over the budget."""
        warm_up = min(1.0, (self.step + 1) / max(1, self.config.warmup_steps))
        return warm_up * max(_LOWEST_RATE, 0.5 * (1 + math.cos(math.pi * min(1.0, fraction))))

    def _spent(self) -> float:
        spent = {"steps": float(self.step), "seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        return spent[self.config.budget_unit]

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16)


def _shuffled(places: Sequence[int], generator: torch.Generator) -> Iterator[int]:
    """Endless: every place once per epoch in a new order."""
    while True:
        yield from (places[i] for i in torch.randperm(len(places), generator=generator).tolist())
