"""Tables and lines for people."""

import shlex

from rich.console import Console
from rich.table import Table

from eagle3.acceptance.definitions import AcceptanceFigure
from tasks.planning import Plan
from tasks.results import RIGHT, WRONG, PipelineResult, ServedFigure

_UNITS = {"cpu_seconds": "CPU-seconds", "seconds": "seconds on the clock", "steps": "steps"}


def result_table(result: PipelineResult) -> Table:
    """The one table at the end of a run."""
    table = Table(title=f"{result.model_name} version {result.model_version} ({result.alias})", title_justify="left")
    table.add_column("served")
    table.add_column("captured layers")
    table.add_column("prompts")
    for heading in ("acceptance length", "accepted by position", "tokens/s", "same text"):
        table.add_column(heading, justify="right")
    for row in result.measured.served:
        table.add_row(*_cells(row))
    return table


def _cells(row: ServedFigure) -> tuple[str, ...]:
    figure = row.acceptance
    return (
        row.label,
        ", ".join(row.points) if row.points else "-",
        f"{row.num_prompts} {row.prompts}",
        _length(figure) if figure else "-",
        " ".join(f"{p:.0%}" for p in figure.unconditional) if figure else "-",
        f"{row.tokens_per_second:.0f}",
        f"{row.same_text} of {row.num_prompts}" if row.same_text is not None else "-",
    )


def _length(figure: AcceptanceFigure) -> str:
    error = figure.length_standard_error
    return f"{figure.length:.2f}" + (f" ± {error:.2f}" if error is not None else "")


def closing_words(result: PipelineResult) -> str:
    """What the table means; and of the mismatch its cause and its cure, as the checks found them on that server."""
    right, wrong = result.measured.right(), result.measured.wrong()
    assert right.acceptance is not None
    words = (
        f"With its own layers the drafter commits {right.acceptance.length:.2f} tokens per verification. "
        "On a CPU that is no speed-up: a verification costs as much as the tokens it checks."
    )
    if wrong and wrong.acceptance and wrong.right_length is not None:
        words += (
            f"\nOn the same {wrong.num_prompts} prompts its own layers commit {wrong.right_length:.2f}, the same "
            f"weights on {', '.join(wrong.points or ())} commit {wrong.acceptance.length:.2f}. "
            f"{wrong.same_text} of {wrong.num_prompts} answers are plain greedy decoding's very text: no error, no "
            "other text, only fewer tokens a verification."
        )
        if wrong.findings:
            words += f"\nThe contract check on that server says: {' '.join(wrong.findings)}"
        if wrong.delivered:
            slots = ", ".join(f"slot {place} is {what}" for place, what in enumerate(wrong.delivered, start=1))
            words += f"\nThe states that it delivered, compared with every layer of the target, say: {slots}."
    return words


def print_result(result: PipelineResult, console: Console) -> None:
    console.print()
    console.print(result_table(result))
    console.print(closing_words(result), markup=False)
    console.print()
    stages = {"extract": result.extracted, "validate": result.validated, "train": result.trained}
    times = ", ".join(f"{name} {stage.seconds:.0f} s" for name, stage in stages.items())
    console.print(f"{result.seconds:.0f} s in all: {times}, benchmark {result.measured.seconds:.0f} s", markup=False)
    for name, link in result.links.items():
        console.print(f"{name + ':':<28}{link}", markup=False, soft_wrap=True)


def print_plan(plan: Plan, console: Console) -> None:
    console.print(f"[bold]{plan.name}[/bold]: nothing is started, this is the plan")
    shape = plan.shape
    console.print(
        f"target       {plan.target}: {shape.model_class}, {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"vocabulary {shape.vocab_size}, {shape.dtype} (from {plan.shape_from})",
        markup=False,
    )
    console.print(f"captured     {', '.join(plan.points)}", markup=False)
    console.print(f"layer ids    {plan.ids}", markup=False)
    console.print(
        f"prompts      {plan.num_prompts} (from {plan.prompts_from}), answers of at most {plan.longest_answer} tokens",
        markup=False,
    )
    for heading, line in plan.estimate.lines().items():
        console.print(f"{heading:<13}{line}", markup=False, soft_wrap=True)
    for number, assumption in enumerate(plan.estimate.assumptions):
        console.print(f"{'' if number else 'assumed':<13}{assumption}", markup=False, soft_wrap=True)
    for number, room in enumerate(plan.rooms):
        console.print(f"{'' if number else 'room':<13}{room.sentence()}", markup=False, soft_wrap=True)
    training = plan.training
    samples = training.batch_size * training.gradient_accumulation
    passes = "" if plan.passes is None else f", about {plan.passes:.1f} passes over the samples"
    console.print(
        f"training     {training.budget:g} {_UNITS[training.budget_unit]}{passes}, {samples} samples a "
        f"step, learning rate {training.learning_rate:g}",
        markup=False,
    )
    for number, sentence in enumerate(plan.advice):
        console.print(f"{'' if number else 'careful':<13}{sentence}", markup=False, soft_wrap=True)
    environment = " ".join(f"{key}={value}" for key, value in sorted(plan.environment.items()))
    console.print(f"environment  {environment}", markup=False, soft_wrap=True)
    console.print(f"command      {shlex.join(plan.command)}", markup=False, soft_wrap=True)


__all__ = ["RIGHT", "WRONG", "print_plan", "print_result", "result_table"]
