"""Ids and points in words: what is captured where, and what else the same integers could mean."""

from collections.abc import Iterator, Sequence

from eagle3.capture import CapturePoint
from eagle3.conventions import ENGINES, convention
from eagle3.conventions.base import ConventionError, EngineIds
from eagle3.conventions.sglang_models import MODEL_CLASSES

# A class of each of SGLang's rules, to show what the same integers mean beside it.
_RULE_EXAMPLES = ("LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")


def listed(points: Sequence[CapturePoint]) -> str:
    return ", ".join(points)


def in_words(point: CapturePoint, num_layers: int) -> str:
    """Where a point lies, e.g. `captured at the input of layer 3 = output of layer 2`."""
    if point.boundary is None:
        return "the output of the final norm"
    if point.boundary == 0:
        return "the token embedding = the input of layer 0"
    if point.boundary == num_layers:
        return f"output of layer {num_layers - 1}, the last one, before the final norm"
    return f"captured at the input of layer {point.boundary} = output of layer {point.boundary - 1}"


def explain(engine: str | None, points: Sequence[CapturePoint], num_layers: int) -> tuple[str, ...]:
    """A sentence for each slot in delivered order, then where the ids are written and what the final state is; the
    latter only where the engine's build is known."""
    sentences = tuple(f"{point}: {in_words(point, num_layers)}" for point in points)
    if engine is None:
        return sentences
    known = convention(engine)
    return (
        *sentences,
        f"ids of {known.title}: {known.field}",
        f"final hidden state of {known.title}: {known.final}",
    )


def warn(engine_ids: EngineIds, points: Sequence[CapturePoint], num_layers: int) -> tuple[str, ...]:
    """What a person should know before these ids are used: other meanings of the same integers, and silent traps."""
    return (
        *_traps(engine_ids, points, num_layers),
        *_other_releases(engine_ids, points, num_layers),
        *_other_classes(engine_ids, points, num_layers),
        *_other_engines(engine_ids, points, num_layers),
    )


def warn_of_move(engine: str, ids: EngineIds | None, target: EngineIds) -> tuple[str, ...]:
    """What differs between two engines beside their ids; `ids` are those of `engine`, None where it has none."""
    one, other = convention(engine), convention(target.engine)
    warnings = []
    if _kinds(one.final) != _kinds(other.final):
        always = len(_kinds(one.final)) == len(_kinds(other.final)) == 1
        warnings.append(
            f"The final hidden state {'differs' if always else 'may differ'}: in {one.title} it is {one.final}, in "
            f"{other.title} {other.final}. States of one kind do not train or serve a drafter of the other."
        )
    if ids and {engine, target.engine} == {"sglang", "vllm"} and ids.ids != target.ids:
        warnings.append(
            "A drafter that serves both carries the ids twice: SGLang reads only the key inside eagle_config, vLLM the "
            "one at the top level first. The same integers in both places are wrong in one."
        )
    return tuple(warnings)


def _kinds(final: str) -> set[str]:
    """On which side of the final norm a final state is taken; both where that depends on the engine's path."""
    return {"after", "before"} & set(final.split())


def _traps(engine_ids: EngineIds, points: Sequence[CapturePoint], num_layers: int) -> Iterator[str]:
    known = convention(engine_ids.engine)
    ascending = tuple(sorted(engine_ids.ids))
    if not known.keeps_order and engine_ids.ids != ascending:
        meaning = _meaning(engine_ids.model_copy(update={"ids": ascending}), num_layers)
        if meaning == listed(points):
            yield (
                f"The order of the ids changes nothing: {known.title} delivers the states in the order of the layers, "
                f"{listed(points)}."
            )
        else:
            yield (
                f"The order of the ids matters here: {list(ascending)} means {meaning or 'nothing that is captured'}. "
                "Which id stands first decides how all are read; the states come in the order of the layers anyway."
            )
    if len(points) == 1 and engine_ids.engine == "sglang":
        yield "One slot alone: SGLang's drafter then skips its fc without a word. Capture at least two."
    if engine_ids.engine == "sglang" and -1 in engine_ids.ids and points[0] == "embed":
        yield (
            "Id -1 captures the token embedding: the width stays the same and nothing reports it. SGLang's "
            "--return-aux-hidden-state-layer-ids refuses negative ids."
        )
    try:
        default = known.default(engine_ids.version, engine_ids.model_class, num_layers)
    except ConventionError:
        return
    if default != tuple(points):
        yield (
            f"Where the key is missing or misspelt, {known.title} captures its default without a word: "
            f"{listed(default)}."
        )


def _other_releases(engine_ids: EngineIds, points: Sequence[CapturePoint], num_layers: int) -> Iterator[str]:
    """Runs of releases of the same engine in which the same ids mean something else, or are refused."""
    known = convention(engine_ids.engine)
    runs: list[tuple[str, list[str]]] = []
    for release in known.releases:
        meaning = _meaning(engine_ids.model_copy(update={"version": release}), num_layers)
        classes = known.known_model_classes(release)
        if not meaning and classes is not None and engine_ids.model_class not in classes:
            meaning = listed(points)  # the class captures nothing there at all, which is no question of these ids
        if runs and runs[-1][0] == meaning:
            runs[-1][1].append(release)
        else:
            runs.append((meaning, [release]))
    for meaning, releases in runs:
        if meaning != listed(points):
            span = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
            on = "" if known.known_model_classes(engine_ids.version) is None else f" on {engine_ids.model_class}"
            if meaning:
                yield f"In {known.title} {span} the same ids mean something else{on}: {meaning}."
            else:
                yield f"In {known.title} {span} the same ids do not work{on}: an error, or fewer states than ids."


def _other_classes(engine_ids: EngineIds, points: Sequence[CapturePoint], num_layers: int) -> Iterator[str]:
    if engine_ids.engine not in ("sglang", "specforge") or engine_ids.model_class not in MODEL_CLASSES:
        return
    for model_class in _RULE_EXAMPLES:
        if MODEL_CLASSES[model_class].rule != MODEL_CLASSES[engine_ids.model_class].rule:
            meaning = _meaning(engine_ids.model_copy(update={"model_class": model_class}), num_layers)
            if meaning and meaning != listed(points):
                yield f"On {model_class} the same ids mean something else in that release: {meaning}."


def _other_engines(engine_ids: EngineIds, points: Sequence[CapturePoint], num_layers: int) -> Iterator[str]:
    meanings: dict[str, list[str]] = {}
    for engine in ENGINES:
        known = convention(engine)
        ids = engine_ids.model_copy(update={"engine": engine, "version": known.newest})
        meaning = _meaning(ids, num_layers)
        if engine != engine_ids.engine and meaning and meaning != listed(points):
            meanings.setdefault(meaning, []).append(f"{known.title} {known.newest}")
    for meaning, engines in meanings.items():
        yield f"The same integers mean something else elsewhere: {meaning} in {', '.join(engines)}."


def _meaning(engine_ids: EngineIds, num_layers: int) -> str:
    """The points in words, or nothing where that engine has no meaning for the ids."""
    try:
        return listed(convention(engine_ids.engine).to_points(engine_ids, num_layers))
    except ConventionError:
        return ""
