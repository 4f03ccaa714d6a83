"""Which slip between two conventions makes a claim come true as something else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle3.capture import CapturePoint
from eagle3.conventions import convention, default_points_of, ids_of, points_of
from eagle3.conventions.base import ConventionError, EngineIds, in_order
from eagle3.conventions.sglang import DEEPSEEK_CHANGED, GPT_OSS_CHANGED
from eagle3.conventions.sglang_models import MODEL_CLASSES, NEWEST, RELEASES
from eagle3.conventions.wording import listed

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
    claimed: Sequence[CapturePoint],
    found: Sequence[CapturePoint],
    *,
    num_layers: int,
    model_class: str | None,
    ids: tuple[int, ...] | None = None,
) -> tuple[str, ...]:
    """Sentences that name the slip under which slots claimed as `claimed` hold `found`, most likely first.

    Slot by slot, in the dump's order; a final state (`norm`) may stand last in both. Each sentence says which ids mean
    what in which convention, and the cure. `ids` are those that were sent, where they are known: then other lists
    explain nothing. Empty where the slots agree or no known slip explains them.
    """
    if tuple(claimed) == tuple(found) or len(claimed) != len(found) or not claimed:
        return ()
    aux = [(c, f) for c, f in zip(claimed, found, strict=True) if c.boundary is not None and f.boundary is not None]
    wanted, held = tuple(c for c, _ in aux), tuple(f for _, f in aux)
    sentences: list[str] = []
    if wanted != held:
        sentences += _other_order(wanted, held)
        sentences += _one_list_two_meanings(wanted, held, num_layers, model_class, ids)
        sentences += _embed_first(wanted, held, num_layers, model_class)
        sentences += _default(held, num_layers, model_class)
        if not sentences:
            sentences += _one_off(wanted, held, ids)
    sentences += _final(claimed, found, num_layers)
    return tuple(dict.fromkeys(sentences))[:_MOST]


def of_sent(claimed: Sequence[CapturePoint], sent: EngineIds, num_layers: int) -> str:
    """What the ids that were sent have to do with labels that the tensors refute; empty where nothing is known."""
    wanted = tuple(c for c in claimed if c.boundary is not None)
    reader = _Reader("", sent.engine, sent.version, sent.model_class)
    right = reader.ids(wanted, num_layers)
    where = f"{convention(sent.engine).title} {sent.version} on {sent.model_class}"
    if reader.points(sent.ids, num_layers) == wanted:
        return (
            f"The ids that were sent, {list(sent.ids)}, do mean {listed(wanted)} in {where}: the states were taken "
            "elsewhere, or were renamed or changed after the capture."
        )
    return f"Right for {listed(wanted)} in {where}: {list(right)}." if right else ""


def _other_order(claimed: Points, found: Points) -> Iterator[str]:
    if sorted(claimed) != sorted(found):
        return
    if found == in_order(found):
        yield (
            f"The slots are the right layers in another order: {listed(found)} was delivered, in the order of the "
            f"layers, as SGLang, vLLM and TensorRT-LLM do whatever the order of the ids. Name the slots "
            f"{listed(found)}, or reorder the drafter's fc columns to match."
        )
    else:
        yield (
            f"The slots are the right layers in another order: {listed(found)} instead of {listed(claimed)}. No "
            "engine that delivers in the order of the layers does this: the states were joined in the order of a "
            "list (an unsorted set, or a transformers path that keeps the list's order) or the columns of fc were "
            "swapped. Join them in ascending order."
        )


def _default(found: Points, num_layers: int, model_class: str | None) -> Iterator[str]:
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
                f"{listed(found)} is the default of {name} for {num_layers} layers: the ids were missing or "
                "misspelt in the drafter's config, so the engine took its own list without a word. SGLang reads "
                "only eagle_config.eagle_aux_hidden_state_layer_ids; write the ids there and look at the live "
                "capture list."
            )
            return


def _one_list_two_meanings(
    claimed: Points, found: Points, num_layers: int, model_class: str | None, sent: tuple[int, ...] | None
) -> Iterator[str]:
    """The same ids mean the claim to one reader and the find to another."""
    if sorted(claimed) == sorted(found):
        return
    readers = _readers(model_class)
    lists = dict.fromkeys(ids for reader in readers if (ids := reader.ids(claimed, num_layers)) is not None)
    for ids in lists if sent is None else (sent,):
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
            f"Ids {list(ids)} mean {listed(claimed)} in {_names(meant)}, and {listed(found)} in {_names(read)}: they "
            f"were written for one and read by another. For {listed(claimed)} write "
            f"{cure or 'another list: none fits'}."
        )


def _embed_first(claimed: Points, found: Points, num_layers: int, model_class: str | None) -> Iterator[str]:
    embed = CapturePoint("embed")
    if found == (embed, *claimed[:-1]):
        reader = _own_sglang(model_class)
        did, right = reader.ids(found, num_layers), reader.ids(claimed, num_layers)
        how = f"ids like {list(did)}, whose {did[0]} captures the embedding" if did else "a list that counts it as one"
        cure = f" For {listed(claimed)} write {list(right)} in {reader.name}." if right else ""
        yield f"The embedding stands first and every layer one slot later: {how}.{cure}"
    if claimed == (embed, *found[:-1]):
        yield (
            f"The slots were named as if the embedding came first; the list holds only what was captured, "
            f"{listed(found)}. Name the slots so and leave the states alone."
        )


def _one_off(claimed: Points, found: Points, sent: tuple[int, ...] | None) -> Iterator[str]:
    """Off by one where no pair of known conventions explains it (a slot that one of them cannot express)."""
    offsets = {_at(f) - _at(c) for c, f in zip(claimed, found, strict=True)}
    if offsets in ({1}, {-1}) and sent is not None:
        late = offsets == {1}
        yield (
            f"Every slot is one layer too {'late' if late else 'early'}: each of the ids {list(sent)} is one too "
            f"{'high' if late else 'low'} for this engine, version and model class, as where a list was taken over "
            "from an engine that counts otherwise."
        )
    elif offsets in ({1}, {-1}):
        meant, read = ("boundary", "output") if offsets == {1} else ("output", "boundary")
        yield (
            f"Every slot is one layer too {'late' if offsets == {1} else 'early'}: {meant} numbers (an id is the "
            f"{'input' if meant == 'boundary' else 'output'} of that layer) were read as {read} numbers. Ids count "
            "outputs in SGLang (most classes), TensorRT-LLM and Model-Optimizer, and inputs in vLLM, speculators "
            "and transformers."
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
            f"it. Hook layer {num_layers - 1} itself, or name the state norm."
        )
    if (norm, before) in pairs or (last, before) in pairs:
        sentences.append(
            f"The last state is that of boundary {num_layers - 1} ({before}) instead of {num_layers}: a loop "
            "captured the input of the last layer and stopped before its output. Take the state after layer "
            f"{num_layers - 1}."
        )
    return sentences


def _readers(model_class: str | None) -> tuple[_Reader, ...]:
    """Who may have written or read the ids, the likeliest first."""
    known = MODEL_CLASSES.get(model_class or "")
    name = model_class if known and model_class else "LlamaForCausalLM"
    newest = str(NEWEST)
    if known and known.rule in ("deepseek", "gpt_oss"):
        changed = RELEASES.index(str(DEEPSEEK_CHANGED if known.rule == "deepseek" else GPT_OSS_CHANGED))
        sglang: tuple[_Reader, ...] = (
            _Reader(f"SGLang up to {RELEASES[changed - 1]}", "sglang", RELEASES[changed - 1], name),
            _Reader(f"SGLang from {RELEASES[changed]} on", "sglang", newest, name),
            _Reader("SGLang on its other model classes", "sglang", newest, "LlamaForCausalLM"),
        )
    else:
        sglang = (
            _Reader("SGLang", "sglang", newest, name),
            _Reader(f"SGLang's DeepSeek family from {DEEPSEEK_CHANGED} on", "sglang", newest, "DeepseekV3ForCausalLM"),
        )
    others = (("vLLM", "vllm"), ("speculators", "speculators"), ("transformers' hidden_states", "transformers"))
    more = (("Model-Optimizer", "modelopt"), ("TensorRT-LLM", "tensorrt_llm"))
    return (
        *sglang,
        *(_Reader(title, engine, convention(engine).newest, "LlamaForCausalLM") for title, engine in (*others, *more)),
    )


def _own_sglang(model_class: str | None) -> _Reader:
    """The newest SGLang that is known, on the target's own class."""
    return next(r for r in _readers(model_class) if r.engine == "sglang" and r.version == str(NEWEST))


def _at(point: CapturePoint) -> int:
    return point.boundary or 0


def _names(readers: Sequence[_Reader]) -> str:
    return ", ".join(reader.name for reader in readers)
