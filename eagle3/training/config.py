"""The trainer's settings, as a form shows them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RESUME_MAY_CHANGE = frozenset({"save_every", "keep_states", "parallel"})


class TrainingConfig(BaseModel):
    """Settings of the training. The defaults are the recipe that was measured on SmolLM2-135M within minutes."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Training")

    budget: float = Field(
        250.0,
        gt=0,
        title="Budget",
        description="How long to train, in the budget's unit. The learning rate follows it",
    )
    budget_unit: Literal["cpu_seconds", "seconds", "steps"] = Field(
        "steps",
        title="Budget unit",
        description="Optimiser steps, CPU-seconds of this process, or seconds on the clock. Only steps give the same "
        "drafter again: a busy machine does fewer in a second, of either kind",
    )
    num_unroll_steps: int = Field(
        3,
        ge=1,
        le=16,
        title="Unroll steps",
        description="Steps of training-time test: how far the drafter learns to draft",
    )
    step_decay: float = Field(
        0.8, gt=0, le=1, title="Step decay", description="Weight of unroll step k in the loss is this to the power k"
    )
    batch_size: int = Field(2, ge=1, title="Batch size", description="Samples (sequences) per micro-batch")
    gradient_accumulation: int = Field(
        1,
        ge=1,
        le=4096,
        title="Micro-batches",
        description="Per optimiser step, over all processes: each draws from a stream of its own, so the number of "
        "processes changes no sample of a step",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        title="Parallel",
        description="Among several processes: the whole drafter in each (DDP), or a part (FSDP2)",
    )
    learning_rate: float = Field(2e-3, gt=0, title="Learning rate", description="Peak of AdamW's learning rate")
    head_learning_rate_scale: float = Field(
        0.25,
        gt=0,
        title="Head learning rate scale",
        description="The head starts as the target's: it learns this much slower",
    )
    warmup_steps: int = Field(10, ge=0, title="Warm-up", description="Optimiser steps until the peak learning rate")
    weight_decay: float = Field(0.0, ge=0, title="Weight decay", description="AdamW's decoupled weight decay")
    clip_norm: float = Field(1.0, gt=0, title="Gradient clip", description="Largest norm of the gradient")
    bf16: bool = Field(True, title="bfloat16", description="Matrix products in bfloat16; weights and sums stay float32")
    warm_start: bool = Field(
        True, title="Warm start", description="Start from the target's last layer where the shapes fit"
    )
    num_draft_steps: int = Field(
        3, ge=1, le=16, title="Draft steps", description="Chain length of the simulated acceptance on held-out samples"
    )
    evaluate_every: int = Field(
        0,
        ge=0,
        title="Evaluate every",
        description="Steps between two simulations on held-out samples; the best drafter is kept. 0: at the end only",
    )
    patience: int = Field(
        0,
        ge=0,
        title="Patience",
        description="Stop after so many evaluations without a longer acceptance. 0: train to the end of the budget",
    )
    save_every: int = Field(
        200,
        ge=1,
        title="Save every",
        description="Steps between two states on disk, from which a killed training resumes",
    )
    keep_states: int = Field(2, ge=1, le=100, title="States kept", description="The newest so many states stay on disk")
    log_every: int = Field(20, ge=1, title="Log every", description="Optimiser steps between two records of progress")
    seed: int = Field(0, ge=0, title="Seed", description="Of the first weights and of the order of the samples")
