"""`eagle3 layers`: from an engine's layer ids to tensors, from tensors to ids, from one engine to another."""

from dataclasses import dataclass
from typing import Annotated

import typer

from eagle3.capture import CapturePoint
from eagle3.conventions import ENGINES, EngineIds, convention, default_points_of, ids_of, points_of
from eagle3.conventions.base import ConventionError
from eagle3.conventions.sglang import live_points
from eagle3.conventions.wording import explain, warn, warn_of_move
from flows.console import AsJson, help_end, out, print_json

EPILOG = help_end(
    "eagle3 layers --model-class LlamaForCausalLM --num-layers 30 --ids 2,15,27",
    "eagle3 layers --engine-version 0.5.12 --model-class KimiK25ForConditionalGeneration --num-layers 61 --ids 2,30,58 "
    "--to vllm",
    "eagle3 layers --engine vllm --model-class LlamaForCausalLM --num-layers 30 --points layers.2,layers.15,layers.27",
    exits="0 done, 1 not known, or nothing that the engine would do, 2 wrong usage",
)
ANY = "any"


@dataclass(frozen=True)
class Answer:
    """Which points are meant, and the ids that mean them; no ids where only a live list is known."""

    engine: str
    version: str
    points: tuple[CapturePoint, ...]
    ids: EngineIds | None
    warnings: tuple[str, ...] = ()


def layers(
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the target.")],
    model_class: Annotated[
        str | None,
        typer.Option(help="`architectures[0]` of the target's config.json. Not needed where it changes nothing."),
    ] = None,
    ids: Annotated[str | None, typer.Option(help="The engine's ids, e.g. 2,15,27.")] = None,
    points: Annotated[str | None, typer.Option(help="Canonical names, e.g. layers.2,layers.15,layers.27.")] = None,
    live_list: Annotated[
        str | None,
        typer.Option(
            help="`layers_to_capture` of a live SGLang as the tap recorded it, e.g. 3,16,28: settles any build."
        ),
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="What the engine captures when it is given no ids.")
    ] = False,
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.")] = "sglang",
    engine_version: Annotated[
        str | None, typer.Option(help="Its version. Unset: the newest one that is known.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="Also give the ids that capture the same in this engine.")] = None,
    to_version: Annotated[str | None, typer.Option(help="Its version. Unset: the newest one that is known.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which tensors an engine's layer ids capture, or which ids capture the tensors you want."""
    if to_version and not to:
        raise typer.BadParameter("--to-version is the version of the engine that --to names: give --to as well")
    if [ids is not None, points is not None, live_list is not None, default].count(True) != 1:
        raise typer.BadParameter("give exactly one of --ids, --points, --live-list and --default")
    version = engine_version or convention(engine).newest
    if live_list is not None:
        answer = _from_live_list(_integers(live_list, "--live-list"), engine, version, model_class, num_layers)
    else:
        on = _model_class(engine, version, model_class)
        if default:
            answer = _from_default(engine, version, on, num_layers)
        elif ids is not None:
            sent = EngineIds(engine=engine, version=version, model_class=on, ids=_integers(ids, "--ids"))
            captured = points_of(sent, num_layers)
            answer = Answer(engine, version, captured, sent, warn(sent, captured, num_layers))
        else:
            wanted = tuple(CapturePoint(part.strip()) for part in (points or "").split(","))
            found = ids_of(wanted, engine=engine, version=version, model_class=on, num_layers=num_layers)
            answer = Answer(engine, version, wanted, found, warn(found, wanted, num_layers))
    moved = _move(answer, to, to_version, model_class, num_layers) if to else None
    _show(answer, moved, num_layers, as_json=as_json)


def _from_live_list(
    held: tuple[int, ...], engine: str, version: str, model_class: str | None, num_layers: int
) -> Answer:
    """What a live SGLang captures, whatever build it is; the ids only where its version and class are known."""
    if engine != "sglang":
        raise typer.BadParameter(f"a live list is SGLang's, recorded by the tap; got --engine {engine}")
    captured = live_points(held, num_layers, model_class=model_class, version=version)
    if model_class is None:
        hint = "Which ids gave this list depends on the model class: name --model-class, and --engine-version."
        return Answer(engine, version, captured, None, (hint,))
    try:
        ids = ids_of(captured, engine=engine, version=version, model_class=model_class, num_layers=num_layers)
    except ConventionError:
        hint = f"Which ids gave this list is not known: SGLang {version} is not a release with a rule for it."
        return Answer(engine, version, captured, None, (hint,))
    return Answer(engine, version, captured, ids, warn(ids, captured, num_layers))


def _from_default(engine: str, version: str, model_class: str, num_layers: int) -> Answer:
    captured = default_points_of(engine=engine, version=version, model_class=model_class, num_layers=num_layers)
    if not convention(engine).takes_ids:
        return Answer(engine, version, captured, None)
    warning = (
        "These are captured where the ids are missing or misspelt; nothing reports it. Write them down explicitly."
    )
    try:
        ids = ids_of(captured, engine=engine, version=version, model_class=model_class, num_layers=num_layers)
    except ConventionError as error:
        return Answer(engine, version, captured, None, (str(error),))
    return Answer(engine, version, captured, ids, (warning,))


def _move(answer: Answer, to: str, to_version: str | None, model_class: str | None, num_layers: int) -> EngineIds:
    version = to_version or convention(to).newest
    on = _model_class(to, version, model_class)
    return ids_of(answer.points, engine=to, version=version, model_class=on, num_layers=num_layers)


def _model_class(engine: str, version: str, model_class: str | None) -> str:
    if model_class is None and convention(engine).known_model_classes(version) is not None:
        raise typer.BadParameter(
            f"--model-class is needed: what {engine} captures was checked class by class, and may differ between them"
        )
    return model_class or ANY


def _integers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{option} takes integers with commas between them, e.g. 2,15,27; got {text!r}"
        ) from None


def _show(answer: Answer, moved: EngineIds | None, num_layers: int, *, as_json: bool) -> None:
    takes_ids = convention(answer.engine).takes_ids
    known = answer.ids is not None or not takes_ids
    sentences = explain(answer.engine if known else None, answer.points, num_layers)
    warnings = answer.warnings
    if moved and known:
        warnings += warn_of_move(answer.engine, answer.ids, moved)
    if as_json:
        result = {
            "points": list(answer.points),
            "ids": list(answer.ids.ids) if answer.ids else [],
            "engine": answer.ids.model_dump(mode="json")
            if answer.ids
            else {"engine": answer.engine, "version": answer.version, "model_class": None, "ids": None},
            "explanation": list(sentences),
            "warnings": list(warnings),
        }
        print_json(result | ({"to": moved.model_dump(mode="json")} if moved else {}))
        return
    none = "not known" if takes_ids else f"none: {answer.engine} takes no ids"
    out.print(f"ids     {_named(answer.ids) if answer.ids else none}", markup=False, soft_wrap=True)
    out.print(f"points  {', '.join(answer.points)}", markup=False, soft_wrap=True)
    for line in sentences:
        out.print(f"  {line}", markup=False, soft_wrap=True)
    if moved:
        out.print(f"to      {_named(moved)}", markup=False, soft_wrap=True)
    for line in warnings:
        out.print(f"careful: {line}", markup=False, soft_wrap=True)


def _named(ids: EngineIds) -> str:
    """The ids beside their convention; a model class that changes nothing is not shown as if it were one."""
    return str(ids) if ids.model_class != ANY else f"{ids.engine} {ids.version} {list(ids.ids)}, any model class"
