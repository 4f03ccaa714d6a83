"""`eagle3 checkpoint`: what is a drafter, what sets two apart, and the same drafter for another engine.

Exit codes: 0 proven or done, 1 refuted or different, 2 wrong usage, 3 could not be checked.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.console import JUDGES, NOT_CHECKED, REFUTED, AsJson, checking, err, help_end, out, plain, print_json
from infra.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3.drafter.opening import OpenedDrafter
    from eagle3.target.config import TargetConfig

checkpoint_app = typer.Typer(
    no_args_is_help=True,
    help="Look at drafters, our own and other people's, and write them in the form of another engine.\n\n"
    "Exit codes: 0 proven, equal or done, 1 refuted or different, 2 wrong usage, 3 could not be checked.",
)

_WHERE = "A drafter: a folder with config.json and safetensors, or the s3:// prefix of one of ours."
Drafter = Annotated[str, typer.Argument(metavar="DRAFTER", help=_WHERE)]
FromEngine = Annotated[
    str | None,
    typer.Option("--engine", help="Of a drafter without a contract: the engine that its layer ids are for."),
]
FromVersion = Annotated[str | None, typer.Option("--engine-version", help="That engine's version.")]
TargetDir = Annotated[
    Path | None, typer.Option("--target", metavar="DIR", help="Hugging Face folder of its target (config.json).")
]
Defaults = Annotated[
    bool,
    typer.Option("--accept-default-layers", help="It names no ids: take the engine's default list, as it would."),
]


@checkpoint_app.command(
    "inspect",
    epilog=help_end(
        "eagle3 checkpoint inspect ./my-drafter",
        "eagle3 checkpoint inspect s3://eagle3/drafters/smollm2-demo/20261129-170000-1a2b3c4d",
        "eagle3 checkpoint inspect ./public-drafter --engine sglang --engine-version 0.5.23 --target models/llama",
        exits=JUDGES,
    ),
)
def inspect(
    drafter: Drafter,
    engine: FromEngine = None,
    engine_version: FromVersion = None,
    target: TargetDir = None,
    accept_default_layers: Defaults = False,
    as_json: AsJson = False,
) -> None:
    """Say what a drafter is: shape, layers, vocabulary, digests. Refuted: a tensor or a flag is not as it must be."""
    from eagle3.drafter.description import describe

    found = describe(_open(drafter, engine, engine_version, target, accept_default_layers, need_points=False))
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    from flows.show_checkpoint import print_description

    print_description(found, out)


@checkpoint_app.command(
    "diff",
    epilog=help_end(
        "eagle3 checkpoint diff ./for-sglang ./for-vllm",
        "eagle3 checkpoint diff ./before ./after --json",
        exits="0 equal, 1 different or refuted, 2 wrong usage, 3 could not be checked",
    ),
)
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=_WHERE)],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one, in any form.")],
    engine: FromEngine = None,
    engine_version: FromVersion = None,
    target: TargetDir = None,
    accept_default_layers: Defaults = False,
    as_json: AsJson = False,
) -> None:
    """Say in what two drafters differ. The same drafter in two forms is equal. Exit 1 where they differ."""
    from eagle3.drafter.description import diff as compare

    a, b = (
        _open(one, engine, engine_version, target, accept_default_layers, need_points=False) for one in (first, second)
    )
    found = compare(a, b)
    if as_json:
        print_json(
            {
                "same": found.same,
                "equal_tensors": found.equal_tensors,
                "differences": [difference.model_dump(mode="json") for difference in found.differences],
            }
        )
    else:
        for difference in found.differences:
            line = f"{difference.subject:<10} {difference.name}: {difference.sentence}"
            out.print(plain(line), markup=False, soft_wrap=True)
        verdict = "the same drafter" if found.same else f"{len(found.differences)} differences"
        out.print(f"{verdict}; {found.equal_tensors} tensors equal bit for bit", markup=False, soft_wrap=True)
    if not found.same:
        raise typer.Exit(REFUTED)


@checkpoint_app.command(
    "export",
    epilog=help_end(
        "eagle3 checkpoint export ./my-drafter ./for-vllm --to vllm --to-version 0.33.0",
        "eagle3 checkpoint export ./my-drafter ./for-old-sglang --to sglang --to-version 0.5.12",
        "eagle3 checkpoint export ./public ./for-sglang --engine speculators --engine-version 0.9.0 "
        "--target models/llama --to sglang --to-version 0.5.23",
        exits="0 done, 1 refuted, 2 wrong usage, 3 could not be checked",
    ),
)
def export(
    drafter: Drafter,
    destination: Annotated[Path, typer.Argument(metavar="NEW", help="A new folder: nothing is overwritten.")],
    to: Annotated[str, typer.Option(help="sglang, vllm or speculators.")],
    to_version: Annotated[
        str | None, typer.Option(help="Its version: what layer ids mean depends on it. Unset: the newest known.")
    ] = None,
    engine: FromEngine = None,
    engine_version: FromVersion = None,
    target: TargetDir = None,
    accept_default_layers: Defaults = False,
    with_embedding: Annotated[
        bool, typer.Option("--with-embedding", help="Save the target's embedding too (needs --target's weights).")
    ] = False,
    verifier: Annotated[
        str | None, typer.Option(help="Name or path of the target in speculators' form. Unset: the contract's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a drafter in the form, and with the layer ids, of another engine or version. Same weights, same digest."""
    from eagle3.conventions import convention, ids_of
    from eagle3.drafter.checkpoint import save_checkpoint, write_checkpoint

    opened = _open(drafter, engine, engine_version, target, accept_default_layers, need_points=True)
    contract = opened.contract
    if contract is not None:
        model_class, num_layers = contract.target.model_class, contract.target.num_layers
    else:
        config = _target_config(target)
        model_class, num_layers = config.model_class, config.num_layers
    version = to_version or convention(to).newest
    ids = ids_of(opened.points, engine=to, version=version, model_class=model_class, num_layers=num_layers)
    embedding = _embedding(target, opened) if with_embedding else None
    if contract is not None:
        save_checkpoint(
            destination,
            opened.drafter,
            opened.vocab,
            contract,
            ids,
            coverage=opened.coverage,
            embedding=embedding,
            verifier=verifier,
        )
    else:
        write_checkpoint(destination, opened.drafter, opened.vocab, ids, embedding=embedding, verifier=verifier)
    for note in opened.notes:
        err.print(plain(f"careful: {note}"), markup=False, soft_wrap=True)
    if as_json:
        print_json({"folder": str(destination), "engine_ids": ids.model_dump(mode="json"), "points": opened.points})
        return
    out.print(plain(f"wrote   {destination}"), markup=False, soft_wrap=True)
    out.print(f"ids     {ids}", markup=False, soft_wrap=True)
    out.print(f"points  {', '.join(opened.points)}", markup=False, soft_wrap=True)


def _open(
    named: str,
    engine: str | None,
    version: str | None,
    target: Path | None,
    accept_default_layers: bool,
    *,
    need_points: bool,
) -> "OpenedDrafter":
    """Exit 1 where the drafter is not as it must be, 3 where it cannot be read at all."""
    from eagle3.contract import CONTRACT_NAME
    from eagle3.drafter.opening import Source, open_drafter
    from eagle3.drafter.tensors import CheckpointUnreadable
    from eagle3.errors import Eagle3Error
    from infra.stack import connect
    from infra.store import StoreError
    from tasks.drafters import drafter_at

    with checking():  # what is asked, not what the drafter is
        settings, asked = connect(Settings.load()), _target_config(target) if target else None
    try:
        folder, source = drafter_at(named, settings), None
        foreign = folder.is_dir() and not (folder / CONTRACT_NAME).exists()
        if foreign and engine and version and asked:
            source = Source(engine, version, asked, accept_default_layers)
        elif foreign and (need_points or engine or version or target):
            raise typer.BadParameter(
                f"{folder} has no {CONTRACT_NAME}: what its layer ids mean follows from --engine, --engine-version and "
                "--target together"
            )
        return open_drafter(folder, source, need_points=need_points)
    except (CheckpointUnreadable, StoreError) as error:
        err.print(plain(f"could not be checked: {error}"), markup=False, soft_wrap=True)
        raise typer.Exit(NOT_CHECKED) from None
    except Eagle3Error as error:
        err.print(plain(f"refuted: {error}"), markup=False, soft_wrap=True)
        raise typer.Exit(REFUTED) from None


def _target_config(target: Path | None) -> "TargetConfig":
    from eagle3.target.config import read_config

    if target is None:
        raise typer.BadParameter("the target's folder is needed", param_hint="--target")
    return read_config(target)


def _embedding(target: Path | None, opened: "OpenedDrafter") -> "Tensor":
    from eagle3.target import Target

    if target is None:
        if opened.embedding is not None:
            return opened.embedding
        raise typer.BadParameter("--with-embedding takes it from the target's weights", param_hint="--target")
    return Target.open(target).embedding_table()
