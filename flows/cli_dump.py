"""`eagle3 dump`: is a dump whole, what is it, which layers does it really hold, what sets two apart.

Exit codes: 0 proven, 1 refuted, 2 wrong usage, 3 could not be checked.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eagle3.capture import CaptureError, CapturePoint
from flows.console import JUDGES, NOT_CHECKED, REFUTED, AsJson, checking, err, help_end, out, plain, print_json
from infra.settings import Settings

dump_app = typer.Typer(
    no_args_is_help=True,
    help="Look at dumps, our own and other people's; list, copy and remove our own.\n\n"
    "Exit codes: 0 proven or done, 1 refuted, 2 wrong usage, 3 could not be checked.",
)

Dump = Annotated[str, typer.Argument(metavar="DUMP", help="s3:// or file:// prefix, a folder, or a file.")]
Ids = Annotated[
    Path | None,
    typer.Option(help="Token ids for states that come without: JSON lines with `input_ids` and the sample's `id`."),
]


class ReferenceName(StrEnum):
    TARGET = "target"
    PROBE = "probe"


class LayoutName(StrEnum):
    """The keys of `eagle3.dump.foreign.LAYOUTS`, which would bring torch into every command."""

    REQUEST_FOLDERS = "request-folders"
    STATE_LIST = "state-list"
    SPECFORGE = "specforge"
    SPECULATORS = "speculators"
    MODEL_OPTIMIZER = "model-optimizer"


Layout = Annotated[
    LayoutName | None, typer.Option(help="Take the dump for somebody else's of this layout. Unset: recognised.")
]


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere; call it with what is done and what there is in all (0: not known)."""
    if not err.is_terminal:
        yield lambda _done, _total: None
        return
    from rich.progress import Progress

    with Progress(console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


@dump_app.command(
    "verify",
    epilog=help_end(
        "eagle3 dump verify s3://eagle3/dumps/smollm2-demo/20261129-170000-1a2b3c4d",
        "eagle3 dump verify ./my-dump --json",
        exits=JUDGES,
    ),
)
def verify(dump: Dump, as_json: AsJson = False) -> None:
    """Compare every file of one of our dumps with its manifest: is it the dump that was published?"""
    from infra.stack import connect
    from tasks.artifacts import verify_dump

    with checking(), progress("hashing") as on_progress:
        report = verify_dump(dump, connect(Settings.load()), on_progress=on_progress)
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        for check in report.checks:
            out.print(plain(f"{check.verdict:<5} {check.name:<14} {check.sentence}"), markup=False, soft_wrap=True)
    if report.verdict == "fail":
        raise typer.Exit(REFUTED)


@dump_app.command(
    "inspect",
    epilog=help_end(
        "eagle3 dump inspect s3://eagle3/dumps/smollm2-demo/20261129-170000-1a2b3c4d",
        "eagle3 dump inspect ./hidden_states --statistics",
        exits="0 done, 2 wrong usage, 3 could not be read",
    ),
)
def inspect(
    dump: Dump,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Read every row: norms and spread of a slot.")
    ] = False,
    layout: Layout = None,
    ids: Ids = None,
    as_json: AsJson = False,
) -> None:
    """Say what a dump is: layout, samples, slots and what is claimed of them, engine and its layer ids."""
    from flows.show_dump import print_description
    from infra.stack import connect
    from tasks.dump_description import describe
    from tasks.dumps import open_dump

    with checking(), progress("reading") as on_progress:
        settings = connect(Settings.load())
        opened = open_dump(dump, settings, layout=layout, ids=ids)
        description = describe(opened, settings, statistics=statistics, on_progress=on_progress)
    if as_json:
        print_json(description.model_dump(mode="json"))
    else:
        print_description(description, out)


@dump_app.command(
    "attribute",
    epilog=help_end(
        "eagle3 dump attribute s3://eagle3/dumps/smollm2-demo/20261129-170000-1a2b3c4d --target smollm2",
        "eagle3 dump attribute ./old-dump --target models/kimi-k2.5 --claim embed,layers.2,layers.30",
        "eagle3 dump attribute ./my-dump --reference probe",
        exits=JUDGES,
    ),
)
def attribute(
    dump: Dump,
    target: Annotated[
        str | None, typer.Option(metavar="DIR", help="Hugging Face folder of the target. Unset: the dump's own probe.")
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option(help="What the slots are said to be, in order, e.g. embed,layers.2. Unset: what it says itself."),
    ] = None,
    reference: Annotated[
        ReferenceName | None, typer.Option(help="What to compare with. Unset: the target where one is named.")
    ] = None,
    layout: Layout = None,
    ids: Ids = None,
    accept_target: Annotated[
        bool, typer.Option("--accept-target", help="Go on where the target's digests are not those of the manifest.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the target's folder run its own code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which layer of the target each slot really holds, whoever made the dump. Refuted: a claim is wrong."""
    from flows.show_dump import attribution_as_json, print_attribution
    from infra.stack import connect
    from tasks.dump_attribution import WrongClaim, attribute_dump
    from tasks.dumps import open_dump

    claimed = _points(claim)
    with checking(), progress("comparing samples") as on_progress:
        settings = connect(Settings.load())
        opened = open_dump(dump, settings, layout=layout, ids=ids)
        try:
            found = attribute_dump(
                opened,
                settings,
                target=target,
                claim=claimed,
                reference=reference.value if reference else None,
                accept_target=accept_target,
                trust_remote_code=trust_remote_code,
                on_progress=on_progress,
            )
        except WrongClaim as error:
            raise typer.BadParameter(str(error), param_hint="--claim") from None
    if as_json:
        print_json(attribution_as_json(found))
    else:
        print_attribution(found, out)
    if found.verdict != "proven":
        raise typer.Exit(REFUTED if found.verdict == "refuted" else NOT_CHECKED)


@dump_app.command(
    "compare",
    epilog=help_end(
        "eagle3 dump compare ./training-dump ./inference-dump",
        "eagle3 dump compare s3://eagle3/dumps/a/1 ./specforge-rows --json",
        exits="0 no check failed, 1 one did, 2 wrong usage, 3 could not be checked",
    ),
)
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="s3:// or file:// prefix, a folder, or a file.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The same, of the same target.")],
    ids: Ids = None,
    accept_target: Annotated[
        bool, typer.Option("--accept-target", help="Go on where the two name targets with other digests.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put two dumps of one target side by side: statistics of every slot, and the rows of the samples both hold."""
    from flows.show_dump import print_comparison
    from infra.stack import connect
    from tasks.dumps import compare as compare_dumps
    from tasks.dumps import open_dump

    with checking(), progress("reading") as on_progress:
        settings = connect(Settings.load())
        a, b = (open_dump(named, settings, ids=ids) for named in (first, second))
        comparison = compare_dumps(a, b, settings, on_progress, accept_target=accept_target)
    if as_json:
        print_json(comparison.model_dump(mode="json") | {"verdict": comparison.verdict})
    else:
        print_comparison(comparison, out)
    if comparison.verdict == "fail":
        raise typer.Exit(REFUTED)


def _points(claim: str | None) -> tuple[CapturePoint, ...]:
    try:
        return tuple(CapturePoint(part.strip()) for part in claim.split(",")) if claim else ()
    except CaptureError as error:
        raise typer.BadParameter(str(error), param_hint="--claim") from None
