"""One training's drafter, optimiser and clocks: steps, evaluation, and its state for a resume."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3.capture import CapturePoint
from eagle3.drafter.model import Drafter
from eagle3.drafter.packing import PackedBatch
from eagle3.drafter.vocab import VocabMap
from eagle3.training.config import TrainingConfig
from eagle3.training.loss import StepMetrics, Targets, combined, rows_per_step, training_batch, unroll_loss
from eagle3.training.parallel import Processes, gradients_stay, set_whole, whole, wrap
from eagle3.training.samples import TargetParts, TrainingError, TrainingSample

_LOWEST_RATE = 0.02  # of the peak learning rate, at the end of the cosine
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
    rows_per_second: float = 0.0
    heldout_length: float | None = None  # simulated acceptance length, where it was evaluated after this step


class _Loss(nn.Module):
    """The drafter's loss as one module's forward, as DDP and FSDP2 call it."""

    def __init__(self, drafter: Drafter, embedding: Tensor, draft_head: Tensor, config: TrainingConfig) -> None:
        super().__init__()
        self.drafter, self.config = drafter, config
        self._tables = (embedding, draft_head)  # in a tuple: not the module's own

    def forward(
        self, batch: PackedBatch, targets: Targets, rows: Sequence[int], with_metrics: bool
    ) -> tuple[Tensor, list[StepMetrics]]:
        return unroll_loss(
            self.drafter,
            *self._tables,
            batch,
            targets,
            num_steps=self.config.num_unroll_steps,
            decay=self.config.step_decay,
            with_metrics=with_metrics,
            rows=rows,
        )


class Trainer:
    """`step`, `rows`, `seconds` and `cpu_seconds` count what was done, by the processes before a resume too."""

    def __init__(
        self,
        drafter: Drafter,
        parts: TargetParts,
        vocab: VocabMap,
        config: TrainingConfig,
        final: CapturePoint,
        among: Processes,
    ) -> None:
        self.drafter, self.parts, self.config, self.final, self.among = drafter, parts, config, final, among
        self.device = parts.embedding.device
        self.draft_head = parts.head[vocab.target_ids.to(self.device)].float()
        self._model = wrap(_Loss(drafter, parts.embedding, self.draft_head, config), config.parallel, among)
        named = dict(drafter.named_parameters())
        self.names, self._parameters = list(named), list(named.values())
        rate = config.learning_rate
        groups = [
            {"params": [p for name, p in named.items() if name != "lm_head.weight"], "lr": rate},
            {"params": [named["lm_head.weight"]], "lr": rate * config.head_learning_rate_scale},
        ]
        self.peak_rates = [rate, rate * config.head_learning_rate_scale]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
        self.step, self.rows, self.seconds, self.cpu_seconds = 0, 0, 0.0, 0.0

    @property
    def fraction(self) -> float:
        """Of the budget that is spent."""
        spent = {"steps": float(self.step), "seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        return spent[self.config.budget_unit] / self.config.budget

    def take_step(
        self, batches: Sequence[Sequence[TrainingSample]], valid: Sequence[Sequence[Tensor]], *, log: bool
    ) -> StepRecord | None:
        """An optimiser step on the micro-batches of this process. TrainingError, naming them, for a loss of NaN or inf.

        The loss is the mean over the rows of all micro-batches of all processes.
        """
        scale, fraction, steps = self._schedule(), self.fraction, self.config.num_unroll_steps
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * scale
        packed = [training_batch(b, v, self.parts, self.final, steps) for b, v in zip(batches, valid, strict=True)]
        counts = torch.tensor([rows_per_step(targets, steps) for _, targets in packed]).sum(0)
        read = torch.tensor([sum(s.num_rows for batch in batches for s in batch)])
        counts, read = self.among.sum(counts).tolist(), self.among.sum(read)
        losses, metrics = [], []
        for number, (batch, targets) in enumerate(packed):
            last = number == len(packed) - 1
            with nullcontext() if last else gradients_stay(self._model):
                with self._autocast():
                    loss, of_batch = self._model(batch.to(self.device), targets.to(self.device), counts, log)
                (loss * self.among.number).backward()  # the processes' gradients are averaged
            losses.append(loss.detach())
            metrics.append(of_batch)
        total = float(self.among.sum(torch.stack(losses).sum()))
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip_norm)))
        if not (math.isfinite(total) and math.isfinite(norm)):
            named = ", ".join(sample.id for batch in batches for sample in batch)
            raise TrainingError(
                f"step {self.step + 1}: the loss is {total} and the gradient's norm {norm}, with samples {named}. "
                f"Their states are finite, so lower the learning rate (now {self.config.learning_rate}) or lengthen "
                "the warm-up"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.rows += int(read)
        if not log:
            return None
        rate = self.config.learning_rate * scale
        of_steps = combined(metrics, self.among)
        return StepRecord(self.step, fraction, self.seconds, rate, norm, total, tuple(of_steps))

    @torch.no_grad()
    def evaluate(
        self, heldout: Sequence[TrainingSample], valid: Sequence[Tensor], drafter: Drafter
    ) -> dict[str, float]:
        """Held-out figures of a drafter per unroll step, each row weighing the same."""
        trainable, steps = [i for i, v in enumerate(valid) if bool(v.any())], self.config.num_unroll_steps
        found = []
        for first in range(0, len(trainable), 8):
            chosen = trainable[first : first + 8]
            batch, targets = training_batch(
                [heldout[i] for i in chosen], [valid[i] for i in chosen], self.parts, self.final, steps
            )
            with self._autocast():
                _, metrics = unroll_loss(
                    drafter, self.parts.embedding, self.draft_head, batch.to(self.device), targets.to(self.device),
                    num_steps=steps, decay=self.config.step_decay, with_metrics=True,
                )  # fmt: skip
            found.append(metrics)
        return {
            f"heldout_{name}_step{k}": getattr(m, name)
            for k, m in enumerate(combined(found) if found else [], start=1)
            for name in ("loss", "top1", "acceptance")
        }

    def weights(self) -> dict[str, Tensor]:
        """Whole, by the checkpoint's names. Every process must call it."""
        return {name: whole(p).detach().clone() for name, p in zip(self.names, self._parameters, strict=True)}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        set_whole(self._parameters, [weights[name] for name in self.names])

    def tensors(self) -> dict[str, Tensor]:
        """All that the next step depends on beside the samples: weights, moments, the random generator."""
        found = {f"weight/{name}": tensor for name, tensor in self.weights().items()}
        for name, parameter in zip(self.names, self._parameters, strict=True):
            state = self.optimizer.state[parameter]
            found |= {f"{moment}/{name}": whole(state[moment]) for moment in _MOMENTS}
        return found | {"random": torch.get_rng_state()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """After what `tensors` gave, with `step` set."""
        self.set_weights({name: tensors[f"weight/{name}"].to(self.device) for name in self.names})
        for name, parameter in zip(self.names, self._parameters, strict=True):
            state = self.optimizer.state[parameter]
            state["step"] = torch.tensor(float(self.step), device=self.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter)
                set_whole([state[moment]], [tensors[f"{moment}/{name}"].to(self.device)])
        torch.set_rng_state(tensors["random"])

    def _schedule(self) -> float:
        """Linear warm-up over steps, then a cosine over the budget."""
        warm_up = min(1.0, (self.step + 1) / max(1, self.config.warmup_steps))
        return warm_up * max(_LOWEST_RATE, 0.5 * (1 + math.cos(math.pi * min(1.0, self.fraction))))

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16)
