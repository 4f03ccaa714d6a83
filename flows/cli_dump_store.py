"""`eagle3 dump ls|show|copy|prune`: the dumps of a store, as things to keep, to move and to remove.

Exit codes: 0 done, 1 an error with a message, 2 wrong usage, 3 the store or MLflow could not be asked.
"""

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3.errors import Eagle3Error
from flows.cli_dump import progress
from flows.console import NOT_CHECKED, AsJson, checking, err, help_end, out, print_json
from infra.settings import Settings

if TYPE_CHECKING:
    from infra.lineage import DumpUse
    from tasks.housekeeping import StoredDump

Root = Annotated[
    str | None,
    typer.Argument(metavar="[PREFIX]", help="s3:// or file:// prefix, or a folder. Unset: EAGLE3_STORE's dumps."),
]
_AGE = re.compile(r"(\d+)([hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_EXITS = "0 done, 1 an error with a message, 2 wrong usage, 3 the store or MLflow could not be asked"


def ls(root: Root = None, as_json: AsJson = False) -> None:
    """List the dumps of a store: when, what was captured, size, state, and which registered drafters rest on them."""
    from flows.show_store import print_dumps
    from infra.stack import connect

    settings = connect(Settings.load())
    where = _root(root, settings)
    with checking():
        dumps, unknown = _listed(where, settings)
    if as_json:
        print_json(
            {"root": where, "users_unknown": unknown or None, "dumps": [d.model_dump(mode="json") for d in dumps]}
        )
    else:
        print_dumps(where, dumps, unknown, out)


def show(
    dump: Annotated[str, typer.Argument(metavar="DUMP", help="s3:// or file:// prefix, or a folder.")],
    as_json: AsJson = False,
) -> None:
    """Say in words what the manifest of one of our dumps says. Reads nothing else."""
    from flows.show_store import print_manifest
    from infra.stack import connect
    from infra.store import open_store
    from tasks.artifacts import read_manifest
    from tasks.housekeeping import users_of

    settings = connect(Settings.load())
    with checking():
        store = open_store(_uri(dump), settings)
        manifest = read_manifest(store.uri, store)
    if as_json:
        print_json({"uri": store.uri, "sha256": manifest.digest(), "manifest": manifest.model_dump(mode="json")})
        return
    uses, unknown = _uses(settings)
    print_manifest(store.uri, manifest, users_of(store.uri, manifest.digest(), uses), unknown, out)


def copy(
    dump: Annotated[str, typer.Argument(metavar="DUMP", help="s3:// or file:// prefix, or a folder.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="The prefix or folder that will hold it; empty, or new.")],
    as_json: AsJson = False,
) -> None:
    """Copy a dump, every file compared with the manifest, the manifest last. A copy that was stopped goes on."""
    from infra.stack import connect
    from tasks.dump_copy import copy_dump

    settings = connect(Settings.load())
    with progress("copying") as on_progress:
        ref = copy_dump(_uri(dump), _uri(to), settings, on_progress=on_progress)
    if as_json:
        print_json(ref.model_dump(mode="json"))
    else:
        out.print(f"{ref.uri} holds the dump {ref.sha256}", markup=False, soft_wrap=True)


def prune(
    root: Root = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only what is that old, e.g. 12h, 30d, 8w; leftovers: 7d.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Keep so many dumps of each name, the newest ones.")
    ] = None,
    uncommitted: Annotated[
        bool,
        typer.Option("--uncommitted", help="Remove leftovers of extractions and copies instead; they cannot go on."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without it, only say what would go.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also what a registered drafter rests on, and where MLflow cannot be asked."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove dumps by age or number, or leftovers. A dry run unless --yes.

    A dump that the lineage of a registered drafter names stays, and nothing is removed where MLflow cannot be asked.
    """
    from flows.show_store import print_pruned
    from infra.stack import connect
    from tasks import housekeeping

    rule = housekeeping.PruneRule(older_than=_age(older_than), keep_last=keep_last, uncommitted=uncommitted)
    if rule == housekeeping.PruneRule():
        raise typer.BadParameter("say what may go: --older-than AGE, --keep-last N or --uncommitted")
    if uncommitted and keep_last is not None:
        raise typer.BadParameter("--keep-last counts committed dumps, --uncommitted removes leftovers: choose one")
    settings = connect(Settings.load())
    where = _root(root, settings)
    with checking():
        dumps, unknown = _listed(where, settings)
    if unknown and not force:
        err.print(
            f"nothing is removed: which dumps registered drafters rest on is not known ({unknown}). `--force` goes on "
            "without",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(NOT_CHECKED)
    with progress("removing") as on_progress:
        pruned = housekeeping.prune(dumps, rule, settings, force=force, really=yes, on_progress=on_progress)
    if as_json:
        print_json(pruned.model_dump(mode="json"))
    else:
        print_pruned(pruned, out)


def add_to(dump_app: typer.Typer) -> None:
    """Register the four commands."""
    dump_app.command(
        "ls",
        epilog=help_end("eagle3 dump ls", "eagle3 dump ls s3://eagle3/dumps/smollm2-demo --json", exits=_EXITS),
    )(ls)
    dump_app.command(
        "show",
        epilog=help_end(
            "eagle3 dump show s3://eagle3/dumps/smollm2-demo/20261129-170000-1a2b3c4d",
            "eagle3 dump show ./my-dump --json",
            exits=_EXITS,
        ),
    )(show)
    dump_app.command(
        "copy",
        epilog=help_end(
            "eagle3 dump copy s3://eagle3/dumps/smollm2-demo/20261129-170000-1a2b3c4d ./kept",
            "eagle3 dump copy ./kept s3://archive/dumps/kept",
            exits=_EXITS,
        ),
    )(copy)
    dump_app.command(
        "prune",
        epilog=help_end(
            "eagle3 dump prune --older-than 30d --keep-last 3", "eagle3 dump prune --uncommitted --yes", exits=_EXITS
        ),
    )(prune)


def _listed(root: str, settings: Settings) -> "tuple[list[StoredDump], str]":
    """The dumps below `root` with their users; and, where MLflow could not be asked for these, why."""
    from tasks.housekeeping import find_dumps, with_users

    dumps = find_dumps(root, settings)
    uses, unknown = _uses(settings)
    return with_users(dumps, uses), unknown


def _uses(settings: Settings) -> "tuple[tuple[DumpUse, ...], str]":
    from tasks.housekeeping import dump_uses

    try:
        return dump_uses(settings), ""
    except Eagle3Error as error:
        return (), str(error)


def _root(named: str | None, settings: Settings) -> str:
    return _uri(named) if named else f"{settings.store.rstrip('/')}/dumps"


def _uri(named: str) -> str:
    return named.rstrip("/") if "://" in named else Path(named).expanduser().resolve().as_uri()


def _age(text: str | None) -> timedelta | None:
    if text is None:
        return None
    found = _AGE.fullmatch(text)
    if not found:
        raise typer.BadParameter(f"{text!r} is no age: expected a number and h, d or w, e.g. 30d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})
