"""Which slip between two conventions makes a claim come true as something else."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from eagle3.capture import CapturePoint
from eagle3.conventions import convention, default_points_of, ids_of, points_of
from eagle3.conventions.base import ConventionError, EngineIds
from eagle3.conventions.sglang_models import MODEL_CLASSES, NEWEST, RELEASES

_MOST = 5
Points = tuple[CapturePoint, ...]


@dataclass(frozen=True)
class _Reader:
    """One convention under which a list of ids is read."""

    name: str
    engine: str
    version: str
    model_class: str

    def points(self, ids: tuple[int, ...], num_layers: int) -> Points | None:
        try:
            return points_of(
                EngineIds(engine=self.engine, version=self.version, model_class=self.model_class, ids=ids), num_layers
            )
        except ConventionError:
            return None

    def ids(self, points: Points, num_layers: int) -> tuple[int, ...] | None:
        try:
            return ids_of(
                points, engine=self.engine, version=self.version, model_class=self.model_class, num_layers=num_layers
            ).ids
        except ConventionError:
            return None


def explain(
    claimed: Sequence[CapturePoint], found: Sequence[CapturePoint], *, num_layers: int, model_class: str | None
) -> tuple[str, ...]:
    """Sentences that name the slip under which slots claimed as `claimed` hold `found`, most likely first.

    Slot by slot, in the dump's order; a final state (`norm`) may stand last in both. Each sentence says which ids mean
    what in which convention, and the cure. Empty where the slots agree or no known slip explains them.
    """
    if tuple(claimed) == tuple(found) or len(claimed) != len(found) or not claimed:
        return ()
    aux = [(c, f) for c, f in zip(claimed, found, strict=True) if c.boundary is not None and f.boundary is not None]
    wanted, held = tuple(c for c, _ in aux), tuple(f for _, f in aux)
    sentences: list[str] = []
    if wanted != held:
        for slip in _SLIPS:
            sentences += slip(wanted, held, num_layers, model_class)
        if not sentences:
            sentences += _one_off(wanted, held)
    sentences += _final(claimed, found, num_layers)
    return tuple(dict.fromkeys(sentences))[:_MOST]


def _other_order(claimed: Points, found: Points, num_layers: int, model_class: str | None) -> Iterator[str]:  # noqa: ARG001
    if sorted(claimed) != sorted(found):
        return
    if found == _in_order(found):
        yield (
            f"The slots are the right layers in another order: {_listed(found)} was delivered, in the order of the "
            f"layers, as SGLang, vLLM and TensorRT-LLM do whatever the order of the ids. Name the slots "
            f"{_listed(found)}, or reorder the drafter's fc columns to match."
        )
    else:
        yield (
            f"The slots are the right layers in another order: {_listed(found)} instead of {_listed(claimed)}. No "
            "engine "
            "that delivers in the order of the layers does this: the states were joined in the order of a list (an "
            "unsorted set, or a transformers path that keeps the list's order) or the columns of fc were swapped. Join "
            "them in ascending order."
        )


def _default(claimed: Points, found: Points, num_layers: int, model_class: str | None) -> Iterator[str]:  # noqa: ARG001
    """The engine did not find the ids and took its own."""
    known = model_class if model_class in MODEL_CLASSES else "LlamaForCausalLM"
    for engine, name in (("sglang", "SGLang"), ("vllm", "vLLM, speculators, TensorRT-LLM and most others")):
        on = known if engine == "sglang" else "LlamaForCausalLM"
        try:
            default = default_points_of(
                engine=engine, version=convention(engine).newest, model_class=on, num_layers=num_layers
            )
        except ConventionError:
            continue
        if default == found:
            yield (
                f"{_listed(found)} is the default of {name} for {num_layers} layers: the ids were missing or "
                "misspelt in "
                "the drafter's config, so the engine took its own list without a word. SGLang reads only "
                "eagle_config.eagle_aux_hidden_state_layer_ids; write the ids there and look at the live capture list."
            )
            return


def _one_list_two_meanings(claimed: Points, found: Points, num_layers: int, model_class: str | None) -> Iterator[str]:
    """The same ids mean the claim to one reader and the find to another."""
    if sorted(claimed) == sorted(found):
        return
    readers = _readers(model_class)
    lists = dict.fromkeys(ids for reader in readers if (ids := reader.ids(claimed, num_layers)) is not None)
    for ids in lists:
        meant = [reader for reader in readers if reader.points(ids, num_layers) == claimed]
        read = [reader for reader in readers if reader.points(ids, num_layers) == found]
        if not meant or not read:
            continue
        cures: dict[tuple[int, ...], list[str]] = {}
        for reader in read:
            right = reader.ids(claimed, num_layers)
            if right is not None:
                cures.setdefault(right, []).append(reader.name)
        cure = "; ".join(f"{list(right)} for {', '.join(names)}" for right, names in cures.items())
        yield (
            f"Ids {list(ids)} mean {_listed(claimed)} in {_names(meant)}, and {_listed(found)} in {_names(read)}: they "
            f"were written for one and read by another. For {_listed(claimed)} write "
            f"{cure or 'another list: none fits'}."
        )


def _embed_first(claimed: Points, found: Points, num_layers: int, model_class: str | None) -> Iterator[str]:
    embed = CapturePoint("embed")
    if found == (embed, *claimed[:-1]):
        right = _sglang(claimed, num_layers, model_class)
        yield (
            f"The embedding stands first and every layer one slot later: ids like {[-1, *_outputs(claimed[:-1])]}, "
            "whose "
            f"-1 captures the embedding. Leave the -1 out{right}."
        )
    if claimed == (embed, *found[:-1]):
        yield (
            f"The slots were named as if the embedding came first; the list holds only what was captured, "
            f"{_listed(found)}. Name the slots so and leave the states alone."
        )


def _one_off(claimed: Points, found: Points) -> Iterator[str]:
    """Off by one where no pair of known conventions explains it (a slot that one of them cannot express)."""
    offsets = {_at(f) - _at(c) for c, f in zip(claimed, found, strict=True)}
    if offsets in ({1}, {-1}):
        meant, read = ("boundary", "output") if offsets == {1} else ("output", "boundary")
        yield (
            f"Every slot is one layer too {'late' if offsets == {1} else 'early'}: {meant} numbers (an id is the "
            f"{'input' if meant == 'boundary' else 'output'} of that layer) were read as {read} numbers. Ids count "
            "outputs "
            "in SGLang (most classes), TensorRT-LLM and Model-Optimizer, and inputs in vLLM, speculators and "
            "transformers."
        )


_SLIPS: tuple[Callable[[Points, Points, int, str | None], Iterator[str]], ...] = (
    _other_order,
    _one_list_two_meanings,
    _embed_first,
    _default,
)


def _final(claimed: Sequence[CapturePoint], found: Sequence[CapturePoint], num_layers: int) -> list[str]:
    """The last state: before or after the final norm, or of the layer before."""
    pairs = dict.fromkeys(zip(claimed, found, strict=True))
    norm, last = CapturePoint("norm"), CapturePoint.at_boundary(num_layers)
    before = CapturePoint.at_boundary(num_layers - 1) if num_layers else last
    sentences = []
    if (norm, last) in pairs:
        sentences.append(
            f"The final state was taken before the final norm: {last} instead of norm, as vLLM and speculators hand it "
            "over (id N). Apply the target's final norm once, or capture after it as SGLang, transformers and "
            "TensorRT-LLM do."
        )
    if (last, norm) in pairs:
        sentences.append(
            f"{last} holds the state after the final norm: transformers overwrites hidden_states[{num_layers}] with "
            "it. "
            f"Hook layer {num_layers - 1} itself, or name the state norm."
        )
    if (norm, before) in pairs or (last, before) in pairs:
        sentences.append(
            f"The last state is that of boundary {num_layers - 1} ({before}) instead of {num_layers}: a loop "
            "captured the "
            f"input of the last layer and stopped before its output. Take the state after layer {num_layers - 1}."
        )
    return sentences


def _readers(model_class: str | None) -> tuple[_Reader, ...]:
    """Who may have written or read the ids, the likeliest first."""
    known = MODEL_CLASSES.get(model_class or "")
    name = model_class if known and model_class else "LlamaForCausalLM"
    newest = str(NEWEST)
    if known and known.rule in ("deepseek", "gpt_oss"):
        changed = RELEASES.index("0.5.13" if known.rule == "deepseek" else "0.5.17")
        sglang: tuple[_Reader, ...] = (
            _Reader(f"SGLang up to {RELEASES[changed - 1]}", "sglang", RELEASES[changed - 1], name),
            _Reader(f"SGLang from {RELEASES[changed]} on", "sglang", newest, name),
            _Reader("SGLang on its other model classes", "sglang", newest, "LlamaForCausalLM"),
        )
    else:
        sglang = (
            _Reader("SGLang", "sglang", newest, name),
            _Reader("SGLang's DeepSeek family from 0.5.13 on", "sglang", newest, "DeepseekV3ForCausalLM"),
        )
    others = (("vLLM", "vllm"), ("speculators", "speculators"), ("transformers' hidden_states", "transformers"))
    more = (("Model-Optimizer", "modelopt"), ("TensorRT-LLM", "tensorrt_llm"))
    return (
        *sglang,
        *(_Reader(title, engine, convention(engine).newest, "LlamaForCausalLM") for title, engine in (*others, *more)),
    )


def _sglang(points: Points, num_layers: int, model_class: str | None) -> str:
    reader = next(r for r in _readers(model_class) if r.engine == "sglang" and r.version == str(NEWEST))
    ids = reader.ids(points, num_layers)
    return f": {list(ids)} for {reader.name}" if ids is not None else ""


def _outputs(points: Points) -> list[int]:
    return [_at(p) - 1 for p in points]


def _at(point: CapturePoint) -> int:
    return point.boundary or 0


def _in_order(points: Points) -> Points:
    return tuple(sorted(points, key=_at))


def _listed(points: Sequence[CapturePoint]) -> str:
    return ", ".join(points)


def _names(readers: Sequence[_Reader]) -> str:
    return ", ".join(reader.name for reader in readers)
