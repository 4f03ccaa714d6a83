"""The course of a training: steps until the budget is spent, evaluations, the best drafter, states on disk."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3.acceptance.definitions import AcceptanceFigure
from eagle3.acceptance.simulation import simulate_acceptance
from eagle3.drafter.mla import build_drafter
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMap
from eagle3.dump.order import Cursor
from eagle3.dump.prefetch import Prefetch
from eagle3.training.draws import Draws, steps
from eagle3.training.loss import StepMetrics
from eagle3.training.samples import TrainingSample
from eagle3.training.state import TrainingState, load_state, save_state
from eagle3.training.trainer import StepRecord, Trainer


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
    heldout_length: float | None = None  # simulated acceptance length, where it was evaluated last


class Run:
    """One training. `digest` names all that decides it."""

    def __init__(
        self,
        trainer: Trainer,
        samples: Sequence[TrainingSample],
        valid: Sequence[Tensor],
        heldout: Sequence[TrainingSample],
        vocab: VocabMap,
        states: Path | None,
        digest: str,
    ) -> None:
        self.trainer, self.config, self.among = trainer, trainer.config, trainer.among
        self.samples, self.valid, self.heldout, self.vocab = samples, valid, heldout, vocab
        self.states, self.digest = states, digest
        self.history: list[StepRecord] = []
        self.best: AcceptanceFigure | None = None
        self._best_weights: dict[str, Tensor] = {}
        self._best_length: float | None = None
        self._length_before: float | None = None
        self._last_length: float | None = None
        self._best_step, self._without_gain, self._resumed_at = 0, 0, 0

    def go(self, streams: Sequence[Draws], report: Callable[[Progress], None], read_ahead: int) -> list[StepRecord]:
        """Train until the budget is spent or the patience is at its end, at least one step."""
        trainer, config = self.trainer, self.config
        cursor = self._resume()
        if self.heldout and self._length_before is None:
            self._length_before = self._simulate().length
        clock, cpu_clock = time.perf_counter() - trainer.seconds, time.process_time() - trainer.cpu_seconds
        finished = trainer.step > 0 and (trainer.fraction >= 1 or self._out_of_patience())
        with Prefetch(self._read(streams, cursor), 0 if finished else read_ahead) as ready:
            for batches, after in () if finished else ready:
                log = trainer.step % config.log_every == 0
                masks = [[self.valid[place] for place, _ in batch] for batch in batches]
                record = trainer.take_step([[sample for _, sample in batch] for batch in batches], masks, log=log)
                trainer.seconds, trainer.cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu_clock
                fraction = self._agreed(trainer.fraction)
                ends = fraction >= 1
                if self.heldout and not ends and config.evaluate_every and trainer.step % config.evaluate_every == 0:
                    self._evaluate()
                    ends = self._out_of_patience()
                if record is not None:
                    pace = trainer.rows / max(1e-9, trainer.seconds)
                    self.history.append(replace(record, rows_per_second=pace, heldout_length=self._last_length))
                    report(self._progress(self.history[-1], fraction))
                if ends:
                    break
                if trainer.step % config.save_every == 0:
                    self._save(after)
        report(Progress("train", 1.0, 0.0, trainer.step))
        if self.heldout:
            self._evaluate()
        return self.history

    def best_drafter(self, empty: Drafter) -> Drafter:
        """The drafter with the longest simulated acceptance; the last one without held-out samples."""
        weights = self._best_weights or self.trainer.weights()
        empty.load_state_dict(weights)
        return empty.to(self.trainer.device)

    def metrics(self) -> dict[str, float]:
        trainer = self.trainer
        found = {
            "steps": float(trainer.step),
            "rows": float(trainer.rows),
            "train_seconds": trainer.seconds,
            "train_cpu_seconds": trainer.cpu_seconds,
            "rows_per_second": trainer.rows / max(1e-9, trainer.seconds),
            "resumed_at_step": float(self._resumed_at),
        }
        if self.best is not None and self._length_before is not None:
            found["heldout_acceptance_length_before"] = self._length_before
            found["heldout_acceptance_length"] = self.best.length
            found["heldout_acceptance_rate"] = self.best.rate
            found["best_step"] = float(self._best_step)
        return found

    def _read(
        self, streams: Sequence[Draws], cursor: Cursor | None
    ) -> Iterator[tuple[list[list[tuple[int, TrainingSample]]], Cursor]]:
        for batches, after in steps(streams, self.config.batch_size, cursor):
            yield [[(place, self.samples[place]) for place in batch] for batch in batches], after

    def _progress(self, record: StepRecord, fraction: float) -> Progress:
        seconds = self.trainer.seconds
        left = seconds * (1 - fraction) / fraction if 0 < fraction < 1 else 0.0
        top1 = tuple(m.top1 for m in record.steps)
        return Progress(
            "train", min(1.0, fraction), left, self.trainer.step, record.loss, top1, record.rows_per_second,
            self._last_length,
        )  # fmt: skip

    def _agreed(self, figure: float) -> float:
        """The first process's: all must stop at the same step."""
        return float(self.among.sum(torch.tensor(figure if self.among.first else 0.0, dtype=torch.float64)))

    def _simulate(self) -> AcceptanceFigure:
        weights = self.trainer.weights()
        drafter = build_drafter(self.trainer.drafter.config)
        drafter.load_state_dict(weights)
        drafter.to(self.trainer.device)
        return simulate_acceptance(
            drafter, self.vocab, self.trainer.parts.embedding, self.heldout, num_steps=self.config.num_draft_steps
        )

    def _evaluate(self) -> None:
        """Keep the weights where the simulated acceptance is longer than ever before."""
        figure = self._simulate()
        length = self._last_length = self._agreed(figure.length)
        self._without_gain += 1
        if self._best_length is None or length > self._best_length:
            self._best_length, self._best_step, self._without_gain = length, self.trainer.step, 0
            self._best_weights = self.trainer.weights()
            self.best = figure

    def _out_of_patience(self) -> bool:
        return bool(self.config.patience) and self._without_gain >= self.config.patience

    def _save(self, cursor: Cursor) -> None:
        if self.states is None:
            return
        tensors = self.trainer.tensors() | {f"best/{name}": t for name, t in self._best_weights.items()}
        if not self.among.first:
            return
        trainer = self.trainer
        state = TrainingState(
            run=self.digest, step=trainer.step, rows=trainer.rows, seconds=trainer.seconds,
            cpu_seconds=trainer.cpu_seconds, cursor=cursor, length_before=self._length_before,
            best_step=self._best_step, best=self.best, last_length=self._last_length,
            evaluations_without_gain=self._without_gain, history=[asdict(record) for record in self.history],
        )  # fmt: skip
        save_state(self.states, state, tensors, keep=self.config.keep_states)

    def _resume(self) -> Cursor | None:
        """Go on from the newest state on disk -> the cursor of the samples."""
        found = load_state(self.states, self.digest) if self.states is not None else None
        if found is None:
            return None
        state, tensors = found
        trainer = self.trainer
        trainer.step, trainer.rows = state.step, state.rows
        trainer.seconds, trainer.cpu_seconds = state.seconds, state.cpu_seconds
        trainer.restore(tensors)
        self._best_weights = {n.removeprefix("best/"): t for n, t in tensors.items() if n.startswith("best/")}
        self.best, self._best_step = state.best, state.best_step
        self._best_length = state.best.length if state.best else None
        self._last_length, self._without_gain = state.last_length, state.evaluations_without_gain
        self._length_before, self._resumed_at = state.length_before, state.step
        self.history = [_record(line) for line in state.history]
        return state.cursor


def _record(line: dict[str, Any]) -> StepRecord:
    return StepRecord(**line | {"steps": tuple(StepMetrics(**step) for step in line["steps"])})
