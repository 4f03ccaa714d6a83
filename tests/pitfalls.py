"""Every mistake of the field that a dump can carry, and what must find it: which check, with which words."""

from collections.abc import Callable
from dataclasses import dataclass

from eagle3.capture import CapturePoint
from eagle3.dump.reader import DumpReader
from eagle3.evidence.references import Reference
from eagle3.evidence.validate import validate_dump
from tests.planting import (
    Scene,
    answers_empty,
    answers_of_one_token,
    answers_of_the_next_layer,
    behind_a_chunk,
    default_list,
    embed_called_layer,
    file_lost,
    flipped,
    id_outside,
    ids_of_another_engine,
    ids_of_another_version,
    last_chunk_only,
    later,
    layers_called_embed,
    live_list_differs,
    next_layer,
    next_layer_and_late,
    not_finite,
    other_tokens,
    other_weights,
    rewritten,
    roll,
    rows_dropped,
    rows_of_another_request,
    rows_padded,
    sample_left_out,
    samples_exchanged,
    scale,
    shift_points,
    some_rows,
    truncated,
    wrong_gather,
    zeros,
)


@dataclass(frozen=True)
class Mistake:
    """One way to spoil a dump."""

    name: str
    kind: str
    """The row of the field's list that it stands for."""
    plant: Callable[[Scene], None]
    check: str
    """The check that must fail."""
    words: Callable[[Scene], tuple[str, ...]]
    """What its sentence must say: the cause, by name."""


def _says(*words: str) -> Callable[[Scene], tuple[str, ...]]:
    return lambda _scene: words


LABEL = "the label says embed, the data is a layer's output, and the other way round"
BOUNDARY = "off by one boundary through a convention"
VERSION = "a convention that flips with the engine's version"
DEFAULT = "ids missing or misspelt: the engine's default list"
ORDER = "slots in another order"
NORM = "final norm missing, or applied twice"
FINAL = "the last slot is N-1 instead of N"
SHIFT = "rows shifted against token ids"
MISSING = "rows missing: prefix cache, chunked prefill, truncation"
FOREIGN = "rows of another request"
GATHER = "tensor-parallel gather over the wrong group"
FINITE = "NaN, inf, overflow, exploding states"
FILES = "truncated or half-written file"
INDEX = "the file's index is not the dataset's row"
TOKENS = "another tokenizer or chat template; loss mask all zero"
WEIGHTS = "states of another checkpoint"

MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        "layers called [embed, low, mid]",
        LABEL,
        layers_called_embed,
        "attribution",
        lambda s: (
            f"embed holds {s.low}",
            f"{s.low} holds {s.mid}",
            f"{s.mid} holds {s.high}",
            "named as if the embedding came first",
        ),
    ),
    Mistake("layer called embed", LABEL, layers_called_embed, "embed", _says("labelled `embed`, but only 0.0%")),
    Mistake(
        "embed called a layer",
        LABEL,
        embed_called_layer,
        "attribution",
        lambda s: (
            f"{s.low} holds embed",
            f"{s.mid} holds {s.low}",
            "The embedding stands first and every layer one slot later",
            f"whose {s.embedding_id} captures the embedding",
        ),
    ),
    Mistake(
        "embed called a layer, seen exactly",
        LABEL,
        embed_called_layer,
        "embed",
        lambda s: (f"labelled `{s.low}`, but 100.0% of its rows are the target's embedding",),
    ),
    Mistake(
        "every layer one later",
        BOUNDARY,
        shift_points(1),
        "attribution",
        lambda s: (*(f"{p} holds {later(p, 1)}" for p in s.spec.aux), "were written for one and read by another"),
    ),
    Mistake(
        "every layer one earlier",
        BOUNDARY,
        shift_points(-1),
        "attribution",
        lambda s: (*(f"{p} holds {later(p, -1)}" for p in s.spec.aux), "were written for one and read by another"),
    ),
    Mistake(
        "one layer one later",
        BOUNDARY,
        lambda s: s.write(lambda x: {s.mid: x.states[later(s.mid, 1)]}),
        "attribution",
        lambda s: (f"{s.mid} holds {later(s.mid, 1)}",),
    ),
    Mistake(
        "another engine's ids were sent",
        BOUNDARY,
        ids_of_another_engine,
        "engine_ids",
        _says("The ids that were sent mean"),
    ),
    Mistake(
        "ids declared for another version",
        VERSION,
        ids_of_another_version,
        "engine_ids",
        _says("declared for sglang 0.5.12, but sglang 0.5.23 served"),
    ),
    Mistake(
        "the live model captured the layers after",
        VERSION,
        live_list_differs,
        "capture_list",
        lambda s: (f"it captured {', '.join(later(p, 1) for p in s.spec.aux)}",),
    ),
    Mistake("the engine's default layers", DEFAULT, default_list, "attribution", _says("is the default of")),
    Mistake(
        "two slots exchanged",
        ORDER,
        lambda s: s.write(lambda x: {s.low: x.states[s.high], s.high: x.states[s.low]}),
        "attribution",
        lambda s: (f"{s.low} holds {s.high}", f"{s.high} holds {s.low}", "the right layers in another order"),
    ),
    Mistake(
        "one slot three times",
        ORDER,
        lambda s: s.write(lambda x: dict.fromkeys(s.spec.aux, x.states[s.low])),
        "attribution",
        _says("hold one tensor", "how the concatenated states are split into slots"),
    ),
    Mistake(
        "one slot three times, seen exactly",
        ORDER,
        lambda s: s.write(lambda x: dict.fromkeys(s.spec.aux, x.states[s.low])),
        "distinct_slots",
        lambda s: (f"{s.low} and {s.mid}",),
    ),
    Mistake(
        "final norm left out",
        NORM,
        lambda s: s.write(lambda x: {"norm": x.states[s.last]}),
        "attribution",
        _says("The final state was taken before the final norm"),
    ),
    Mistake(
        "final norm left out, seen exactly",
        NORM,
        lambda s: s.write(lambda x: {"norm": x.states[s.last]}),
        "final_norm",
        _says("`norm` has not been through the target's final norm"),
    ),
    Mistake(
        "final norm applied twice",
        NORM,
        lambda s: s.write(lambda x: {"norm": s.normed(x.states[CapturePoint("norm")])}),
        "attribution",
        _says("norm was through the final norm twice"),
    ),
    Mistake(
        "final norm on a slot",
        NORM,
        lambda s: s.write(lambda x: {s.high: s.normed(x.states[s.high])}),
        "attribution",
        lambda s: (f"{s.high} was through the final norm",),
    ),
    Mistake(
        "final state of the layer before",
        FINAL,
        lambda s: s.write(lambda x: {"norm": s.normed(x.states[later(s.last, -1)])}),
        "attribution",
        lambda s: (f"{later(s.last, -1)} after the final norm", "another layer than the last and normed"),
    ),
    Mistake(
        "normed state called the last layer's",
        FINAL,
        lambda s: s.write(
            lambda x: {s.last: x.states[CapturePoint("norm")]}, spec=s.spec.model_copy(update={"final": s.last})
        ),
        "attribution",
        _says("holds the state after the final norm"),
    ),
    Mistake("rows late by one", SHIFT, roll(1), "final_state", _says("rows are late by 1")),
    Mistake("rows late by two", SHIFT, roll(2), "final_state", _says("rows are late by 2")),
    Mistake("rows early by one", SHIFT, roll(-1), "final_state", _says("rows are early by 1")),
    Mistake(
        "every layer one later, and rows late by one",
        SHIFT,
        next_layer_and_late,
        "attribution",
        lambda s: tuple(f"{p} holds {later(p, 1)}, 1 row late" for p in s.spec.aux),
    ),
    Mistake("rows early by two", SHIFT, roll(-2), "final_state", _says("rows are early by 2")),
    Mistake(
        "rows of the slots late by one",
        SHIFT,
        roll(1, aux_only=True),
        "attribution",
        lambda s: (f"Rows are late by 1 in {', '.join(s.spec.aux)}",),
    ),
    Mistake(
        "rows of the slots early by one",
        SHIFT,
        roll(-1, aux_only=True),
        "attribution",
        lambda s: (f"Rows are early by 1 in {', '.join(s.spec.aux)}",),
    ),
    Mistake(
        "first rows missing",
        MISSING,
        rows_dropped,
        "completeness",
        _says("Rows are missing or doubled", "prefix cache"),
    ),
    Mistake(
        "the first third of the rows filled with zeros",
        MISSING,
        rows_padded(1 / 3),
        "attribution",
        _says("not in the first third of its samples' rows", "prefix cache"),
    ),
    Mistake(
        "most rows filled with zeros",
        MISSING,
        rows_padded(0.7),
        "attribution",
        _says("not in the first and middle thirds of its samples' rows", "prefix cache"),
    ),
    Mistake(
        "rows of the last chunk twice",
        MISSING,
        last_chunk_only,
        "attribution",
        _says("Rows are missing or doubled", "chunked prefill"),
    ),
    Mistake(
        "the slots of all answers empty",
        MISSING,
        answers_empty,
        "attribution",
        lambda s: (*(f"{p} holds {p}, but not in the rows of the answers" for p in s.spec.aux), "(prefill, decode)"),
    ),
    Mistake(
        "the slots of all answers empty, seen exactly",
        MISSING,
        answers_empty,
        "finite",
        _says("but zeros in", "was never filled"),
    ),
    Mistake(
        "the slots of all answers from the next layer",
        MISSING,
        answers_of_the_next_layer,
        "attribution",
        lambda s: (f"{s.low} holds", str(later(s.low, 1)), "from two paths of the server (prefill, decode)"),
    ),
    Mistake(
        "rows of other tokens behind a chunk's end",
        MISSING,
        behind_a_chunk,
        "attribution",
        _says("fit n", "chunked prefill"),
    ),
    Mistake("a tenth of the rows empty", MISSING, some_rows(0.1, zeros), "finite", _says("was never filled")),
    Mistake("two fifths of the rows empty", MISSING, some_rows(0.4, zeros), "attribution", _says("were overwritten")),
    Mistake(
        "a quarter of the rows from the next layer",
        MISSING,
        some_rows(0.25, next_layer),
        "attribution",
        lambda s: (
            *(f"the others hold {later(p, 1)}" for p in (s.low, s.mid)),
            "or mixed with those of other requests",
        ),
    ),
    Mistake(
        "a quarter of the rows of other tokens",
        FOREIGN,
        some_rows(0.25, other_tokens),
        "attribution",
        _says("mixed with those of other requests"),
    ),
    Mistake(
        "one sample with another request's rows",
        FOREIGN,
        rows_of_another_request,
        "final_state",
        lambda s: (f"sample '{s.victim}'", "rows of another request"),
    ),
    Mistake(
        "one sample with another request's slots",
        FOREIGN,
        lambda s: rows_of_another_request(s, aux_only=True),
        "attribution",
        lambda s: (f"sample '{s.victim}'", f"of sample '{s.captured.samples[-1].id}'"),
    ),
    Mistake("one rank's half twice", GATHER, wrong_gather, "attribution", _says("a gather over the wrong group")),
    Mistake(
        "a NaN in one row",
        FINITE,
        not_finite(float("nan")),
        "finite",
        lambda s: (f"sample '{s.victim}', row 2, {s.mid}",),
    ),
    Mistake(
        "an infinity in one row",
        FINITE,
        not_finite(float("inf")),
        "finite",
        lambda s: (f"sample '{s.victim}', row 2, {s.mid}", "overflow"),
    ),
    Mistake("a slot scaled by two", FINITE, scale(2.0), "attribution", lambda s: (f"{s.mid} was multiplied by 2",)),
    Mistake(
        "a slot exploded", FINITE, scale(1024.0), "attribution", lambda s: (f"{s.mid} was multiplied by 1.02e+03",)
    ),
    Mistake("half a shard", FILES, truncated, "integrity", _says("is truncated")),
    Mistake("a flipped bit", FILES, flipped, "integrity", _says("sha256")),
    Mistake("a lost shard", FILES, file_lost, "integrity", _says("is missing")),
    Mistake(
        "states rewritten after the capture",
        FILES,
        rewritten(lambda s: s.mid, lambda state: state.roll(1, 0)),
        "content",
        _says("rewritten"),
    ),
    Mistake(
        "two samples under each other's name", INDEX, samples_exchanged, "content", _says("samples were exchanged")
    ),
    Mistake("a sample left out", INDEX, sample_left_out, "content", _says("added, left out or renamed")),
    Mistake(
        "ids of another tokenizer",
        TOKENS,
        rewritten(lambda _s: "input_ids", lambda ids: ids.flip(0)),
        "token_ids",
        _says("not those that were hashed at capture", "another tokenizer"),
    ),
    Mistake("an id outside the vocabulary", TOKENS, id_outside, "token_ids", _says("is outside 0 ...")),
    Mistake(
        "a loss mask for other lengths",
        TOKENS,
        rewritten(lambda _s: "loss_mask", lambda mask: mask.roll(1)),
        "token_ids",
        _says("the loss mask does not mark its answer"),
    ),
    Mistake("an empty loss mask", TOKENS, answers_of_one_token, "token_ids", _says("The loss mask is empty")),
    Mistake("states of another checkpoint", WEIGHTS, other_weights, "attribution", _says("other weights")),
)


def miss(mistake: Mistake, scene: Scene, reference: Reference) -> str:
    """Plant the mistake and validate. Empty where the right check fails and names the cause; else what came instead."""
    mistake.plant(scene)
    report = validate_dump(DumpReader.open(scene.folder), scene.captured.parts, reference=reference)
    check = next(c for c in report.checks if c.name == mistake.check)
    unsaid = [words for words in mistake.words(scene) if words not in check.sentence]
    if check.verdict == "fail" and not unsaid:
        return ""
    others = ", ".join(c.name for c in report.failed()) or "none"
    return f"{mistake.check}: {check.verdict}, without {unsaid}; failed: {others}; it says: {check.sentence}"
