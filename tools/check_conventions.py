"""Proof of `eagle3/conventions`: the published wheels' own functions are run and compared with the registry.

    python tools/check_conventions.py WHEELS           compare; exit 1 on any difference
    python tools/check_conventions.py WHEELS --write   and write the table into docs/conventions.md

WHEELS is a folder; what is not there is fetched with `pip download --no-deps` (SGLang 330 MB in all, speculators 2 MB,
SpecForge 0.4 MB). Nothing of a wheel is imported: the functions are taken out of the source text and run on stand-ins.
"""

import argparse
import ast
import itertools
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3.conventions import ConventionError, EngineIds, points_of, sglang, sglang_dflash, specforge, speculators
from eagle3.conventions.sglang_models import MODEL_CLASSES, RELEASES
from tools.capture_source import DFLASH, EAGLE3, NotFollowed, Place, Source

DOCS = Path(__file__).resolve().parents[1] / "docs" / "conventions.md"
BEGIN, END = "<!-- begin: tools/check_conventions.py -->", "<!-- end: tools/check_conventions.py -->"
# Their ids count passes over layers, not layers.
LOOPED = {"NanbeigeForCausalLM"}
SHOWN = (None, (2, 30, 58), (1, 29, 57), (3, 31, 59), (1, 30, 58), (30, 1, 58), (0, 3, 31), (-1, 2, 30), (2, 30, 61))
IdLists = Sequence[tuple[int, tuple[int, ...] | None]]
ID_LISTS: IdLists = (
    *((61, ids) for ids in (*SHOWN, (2, 30, 60), (5,))),
    *((num_layers, None) for num_layers in (6, 8, 30, 32, 36, 48, 80)),
    *((8, ids) for ids in itertools.permutations(range(-1, 9), 2)),
)


@dataclass(frozen=True)
class Proven:
    """What one class of one release does."""

    release: str
    name: str
    shown: tuple[str, ...]
    embed: bool
    last: bool


def check_sglang(
    source: Source, release: str, id_lists: IdLists = ID_LISTS
) -> tuple[list[str], list[Proven], list[str]]:
    """Differences from the registry, what was proven, and the classes that this does not follow."""
    differences, proven, not_followed = [], [], []
    claimed = set(sglang.known_model_classes(release))
    for name, place in source.entry_classes(EAGLE3).items():
        try:
            source.captured(place, (2, 30, 58), 61)
            embed, last = source.ends(place)
        except (NotFollowed, AttributeError) as error:
            not_followed.append(f"{name}: {error}")
            continue
        if name not in claimed:
            differences.append(f"sglang {release} {name}: captures, but the registry does not know it")
            continue
        claimed.remove(name)
        differences += list(differences_of(source, place, release, (embed, last), id_lists))
        shown = tuple(_shown(source, place, ids) for ids in SHOWN)
        proven.append(Proven(release, name, shown, embed, last))
    differences += [f"sglang {release} {name}: claimed, and not proven" for name in sorted(claimed)]
    return differences, proven, not_followed


def differences_of(
    source: Source, place: Place, release: str, ends: tuple[bool, bool], id_lists: IdLists = ID_LISTS
) -> Iterator[str]:
    """Where one class does something else than the registry says; `ends` as `Source.ends` found them."""
    name = place.node.name
    embed, last = ends
    for num_layers, ids in id_lists:
        claimed = sglang.boundaries(release, name, num_layers, ids)
        try:
            found = source.captured(place, ids, num_layers)
        except IndexError:  # a flag set on a layer that does not exist: SGLang does not start
            found = None
        where = f"sglang {release} {name}, {num_layers} layers, ids {ids}"
        if found is not None and found != claimed:
            yield f"{where}: the class captures {list(found)}, the registry says {list(claimed)}"
        if ids is None or len(set(ids)) != len(ids):
            continue
        lowest, highest = 0 if embed else 1, num_layers if last else num_layers - 1
        delivered = found is not None and all(lowest <= b <= highest for b in found)
        try:
            points_of(EngineIds(engine="sglang", version=release, model_class=name, ids=ids), num_layers)
            expressible = True
        except ConventionError:
            expressible = False
        if delivered != expressible:
            yield f"{where}: delivered whole is {delivered} by the class's walk, {expressible} by the registry"


def _shown(source: Source, place: Place, ids: Sequence[int] | None) -> str:
    try:
        return ",".join(map(str, source.captured(place, ids, 61)))
    except IndexError:
        return "IndexError"


def check_dflash(source: Source, release: str) -> list[str]:
    """Every class that the registry knows captures the output of each id, and reaches the last layer where it says
    so."""
    differences = []
    places = source.entry_classes(DFLASH)
    for name, (since, last_since) in sglang_dflash.MODEL_CLASSES.items():
        known = sglang_dflash.CONVENTION.release(release) >= since
        if known != (name in places and _plus_one(source, places[name])):
            differences.append(
                f"sglang_dflash {release} {name}: captures outputs is {not known}, the registry says {known}"
            )
        elif known:
            reaches = last_since is not None and sglang_dflash.CONVENTION.release(release) >= last_since
            if source.ends(places[name])[1] != reaches:
                differences.append(f"sglang_dflash {release} {name}: reaches the last layer is {not reaches}")
    others = set(places) - set(sglang_dflash.MODEL_CLASSES) - LOOPED
    unknown = sorted(name for name in others if _plus_one(source, places[name]))
    return differences + [
        f"sglang_dflash {release} {name}: captures outputs, unknown to the registry" for name in unknown
    ]


def _plus_one(source: Source, place: Place) -> bool:
    try:
        return all(
            sorted(source.captured(place, ids, 61, DFLASH)) == [i + 1 for i in ids]
            for ids in ((2, 30, 58), (1, 29, 57), (0, 5), (7,))
        )
    except (NotFollowed, AttributeError):
        return False


def check_speculators(wheel: Path, release: str) -> list[str]:
    """Its default, and for its own vLLM worker (up to 0.4.0.1) that it keeps a state after the layer ran."""
    convention, differences = speculators.CONVENTION, []
    worker = _text(wheel, "speculators/data_generation/custom_worker.py")
    after = bool(worker) and _captures_after(worker)
    if (convention.release(release) < speculators.BOUNDARIES) != after:
        differences.append(f"speculators {release}: its own worker keeps a layer's output is {after}")
    for num_layers in (8, 30, 61):
        if after:
            text = _text(wheel, "speculators/data_generation/vllm_hidden_states_generator.py")
            found = eval(_assigned(text, "self.layer_ids"), {"num_layers": num_layers})[:-1]
        else:
            resolve = _function(_text(wheel, "speculators/models/utils.py"), "resolve_target_layer_ids")
            config = SimpleNamespace(num_hidden_layers=num_layers)
            scope = {"get_verifier_config": lambda *_, c=config, **__: c, "warnings": warnings}
            scope |= {"DEFAULT_TARGET_LAYER_IDS_WARNING": ""}
            with warnings.catch_warnings(action="ignore"):
                found = _run(resolve, scope)(None, "target")
        if tuple(found) != speculators.default_ids(num_layers):
            differences.append(f"speculators {release}: default {found} for {num_layers} layers")
    return differences


def check_specforge(wheel: Path, release: str) -> list[str]:
    """Its default, and that it pins the SGLang whose rule the registry lends it."""
    differences = []
    resolve = _function(_text(wheel, "specforge/algorithms/model_providers.py"), "resolve_eagle_capture_layers")
    run = _run(resolve, {"Config": Any, "Any": Any, "List": list})
    cfg = SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layer_ids=None))
    for num_layers in (8, 30, 61):
        found = run(cfg, {}, SimpleNamespace(num_hidden_layers=num_layers))
        if tuple(found) != specforge.default_ids(num_layers):
            differences.append(f"specforge {release}: default {found} for {num_layers} layers")
    metadata = _text(wheel, f"specforge-{release}.dist-info/METADATA")
    if f"Requires-Dist: sglang=={specforge.SGLANG}\n" not in metadata:
        differences.append(f"specforge {release}: does not pin sglang {specforge.SGLANG}")
    return differences


def _text(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode("utf-8-sig") if name in archive.namelist() else ""


def _function(text: str, name: str) -> ast.FunctionDef:
    return next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)


def _run(function: ast.FunctionDef, scope: dict[str, Any]) -> Callable[..., Sequence[int]]:
    exec(compile(ast.Module([function], []), function.name, "exec"), scope)
    result: Callable[..., Sequence[int]] = scope[function.name]
    return result


def _assigned(text: str, target: str) -> str:
    """The first list that is assigned to a name."""
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Assign) and isinstance(n.value, ast.List))
    return next(ast.unparse(n.value) for n in nodes if ast.unparse(n.targets[0]) == target)


def _captures_after(worker: str) -> bool:
    """Whether the loop over the layers keeps `hidden_states + residual` after it called the layer."""
    loops = (n for n in ast.walk(ast.parse(worker)) if isinstance(n, ast.For) and "self.layers" in ast.unparse(n.iter))
    for loop in loops:
        lines = [ast.unparse(statement) for statement in loop.body]
        calls = next((i for i, line in enumerate(lines) if "= layer(" in line), None)
        keeps = next((i for i, line in enumerate(lines) if "aux_hidden_states.append" in line), None)
        if calls is not None and keeps is not None:
            return keeps > calls
    return False


def table(proven: Sequence[Proven]) -> str:
    """Classes that do the same over the same releases, one row each."""
    by_class: dict[str, list[Proven]] = {}
    for each in proven:
        by_class.setdefault(each.name, []).append(each)
    rows: dict[tuple[str, str, str, str, tuple[str, ...]], list[str]] = {}
    for name, history in by_class.items():
        for (shown, embed, last), run in itertools.groupby(history, key=lambda p: (p.shown, p.embed, p.last)):
            releases = [each.release for each in run]
            key = (releases[0], releases[-1], "yes" if embed else "TypeError", "yes" if last else "no", shown)
            rows.setdefault(key, []).append(name)
    heads = ["no ids" if ids is None else str(list(ids)).replace(" ", "") for ids in SHOWN]
    lines = [
        f"| model classes | releases | {' | '.join(heads)} | boundary 0 | boundary N |",
        f"|---|---|{'---|' * len(heads)}---|---|",
    ]
    for (first, last_release, embed, last, shown), names in sorted(rows.items(), key=lambda r: (r[1][0], r[0])):
        span = first if first == last_release else f"{first} to {last_release}"
        lines.append(f"| {', '.join(sorted(names))} | {span} | {' | '.join(shown)} | {embed} | {last} |")
    return "\n".join(lines)


def write_table(text: str) -> None:
    page = DOCS.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"{DOCS} lacks the markers {BEGIN} and {END}")
    DOCS.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page), encoding="utf-8")


def wheel_of(folder: Path, project: str, release: str) -> Path:
    """The wheel of a release in the folder; fetched if it is not there."""
    if not (found := sorted(folder.glob(f"{project}-{release}-*.whl"))):
        command = ["pip", "download", "--no-deps", "--quiet", "--only-binary", ":all:", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", *command, f"{project}=={release}"], check=True)
        found = sorted(folder.glob(f"{project}-{release}-*.whl"))
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder of the wheels; what is missing is downloaded into it")
    parser.add_argument("--write", action="store_true", help="write the table into docs/conventions.md")
    arguments = parser.parse_args()
    arguments.wheels.mkdir(parents=True, exist_ok=True)
    differences: list[str] = []
    proven: list[Proven] = []
    for release in RELEASES:
        source = Source.from_wheel(wheel_of(arguments.wheels, "sglang", release))
        found, classes, not_followed = check_sglang(source, release)
        if release in sglang_dflash.CONVENTION.releases:
            found += check_dflash(source, release)
        differences, proven = differences + found, proven + classes
        print(
            f"sglang {release}: {len(classes)} classes x {len(ID_LISTS)} id lists, {len(found)} differences", flush=True
        )
        for line in not_followed:
            print(f"  not claimed: {line}")
    for module, check in ((speculators, check_speculators), (specforge, check_specforge)):
        for release in module.CONVENTION.releases:
            found = check(wheel_of(arguments.wheels, module.CONVENTION.engine, release), release)
            differences += found
            print(f"{module.CONVENTION.engine} {release}: {len(found)} differences", flush=True)
    never = sorted(set(MODEL_CLASSES) - {each.name for each in proven})
    differences += [f"{name} is in the registry and was proven for no release" for name in never]
    if arguments.write:
        write_table(table(proven))
    for line in differences:
        print(f"DIFFERENCE {line}")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
