"""What is allowed and probably not wanted: too little data for the recipe, said with figures before anything starts."""

from tasks.params import PipelineParams

# The demo's set, with which a drafter was measured: 126 word problems, acceptance length 1.7 on others of that kind.
FEW_SAMPLES = 100
# Reported as too few for general text (speculators issue 751).
ADVISABLE_SAMPLES = 5000
# The demo makes 4 passes, configs/kimi-k2.5.yaml 6.
MANY_PASSES = 20


def passes_over(params: PipelineParams, num_samples: int) -> float | None:
    """How often the training sees each sample; None where its budget is a time."""
    training = params.training
    seen = training.budget * training.batch_size * training.gradient_accumulation
    return seen / num_samples if training.budget_unit == "steps" else None


def few_samples(num_samples: int) -> str | None:
    """What to say of a set that is smaller than advisable; None of one that is not."""
    if num_samples >= ADVISABLE_SAMPLES:
        return None
    if num_samples < FEW_SAMPLES:
        return (
            f"{num_samples} training prompts are few: the demo's 126, all of one kind, bring an acceptance length of "
            "1.7, and on that kind only (prompts.file, prompts.num_train)"
        )
    return (
        f"{num_samples} training prompts are fewer than {ADVISABLE_SAMPLES}, which were reported as too few for "
        "general text (speculators issue 751): expect acceptance on text of their kind only"
    )


def data_advice(params: PipelineParams, num_samples: int, most_answer_tokens: int) -> tuple[str, ...]:
    """A sentence for each figure that says "too little data"; empty where there is enough.

    `most_answer_tokens`: of all training answers together, an upper bound.
    """
    said = []
    few = few_samples(num_samples)
    if few and num_samples < FEW_SAMPLES:  # more can be enough for one kind of text: the training's log says the rest
        said.append(few)
    passes, training = passes_over(params, num_samples), params.training
    if passes is not None and passes > MANY_PASSES:
        said.append(
            f"{training.budget:g} steps of {training.batch_size} samples are {passes:.0f} passes over {num_samples} "
            "samples: the drafter learns them by heart. The demo makes 4 (training.budget)"
        )
    vocabulary = params.drafter.draft_vocab_size
    if most_answer_tokens < vocabulary:
        said.append(
            f"the answers have at most {most_answer_tokens:,} tokens, the draft vocabulary {vocabulary:,}: some of it "
            "can never occur in them (drafter.draft_vocab_size, answers.max_new_tokens)"
        )
    if num_samples < 5:
        said.append(
            f"of {num_samples} samples none is left for the simulated acceptance, which takes a fifth of them at most"
        )
    return tuple(said)
