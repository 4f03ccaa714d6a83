"""Which layers does a dump really hold? Its samples against the target, or against the probe that came with it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from eagle3.capture import CapturePoint
from eagle3.errors import Eagle3Error
from infra.settings import Settings
from tasks.artifacts import CannotCheck
from tasks.dumps import OpenedDump, OthersDump, Progress, PublishedDump
from tasks.params import TargetParams
from tasks.targets import open_target

if TYPE_CHECKING:
    from eagle3.dump.slots import SlotSample
    from eagle3.evidence.attributed import Attribution, SlotAttribution, SlotVerdict
    from eagle3.evidence.attribution import Reference
    from eagle3.evidence.report import Check
    from eagle3.target import Target

MOST_SHARDS = 4
"""Shards that are read (or fetched) for an attribution; its samples are spread over them."""


SOME_ROWS = 0.02
"""Share of the rows from which a slot has to do with the target. Measured: of the same shape with other weights, of
another family, vocabulary or depth, no row of any slot fits; of a slot of zeros but for its last tenth, 10% do."""


class WrongClaim(Eagle3Error, ValueError):
    """A claim that does not fit the slots of a dump."""


@dataclass(frozen=True)
class AttributedDump:
    """Which layers a dump really holds, and who claimed what."""

    where: str
    layout: str
    claimed_by: str
    attribution: "Attribution"
    alignment: "Check | None" = None  # the final state against the tokens, of somebody else's dump

    @property
    def altered(self) -> "tuple[SlotAttribution, ...]":
        """Slots of which nothing is claimed and which are no plain tensor of the target: shifted, scaled or normed.

        No claim could make them right.
        """
        slots = (slot for slot in self.attribution.slots if slot.claimed is None and slot.verdict == "proven")
        return tuple(slot for slot in slots if not slot.found.is_plain)

    @property
    def verdict(self) -> "SlotVerdict":
        misaligned = self.alignment is not None and self.alignment.verdict == "fail"
        return "refuted" if self.altered or misaligned else self.attribution.verdict


@dataclass(frozen=True)
class _Compared:
    """What the samples are compared with."""

    reference: "Reference"
    model_class: str
    target: "Target | None" = None


def attribute_dump(
    dump: PublishedDump | OthersDump,
    settings: Settings,
    *,
    target: str | None,
    on_progress: Progress,
    reference: Literal["target", "probe"] | None = None,
    claim: Sequence[CapturePoint] = (),
    accept_target: bool = False,
    trust_remote_code: bool = False,
) -> AttributedDump:
    """Match every slot of the dump against every boundary of the target (or of the dump's own probe).

    `target` is a Hugging Face folder; for our own dumps it must be the one of the manifest, unless `accept_target`.
    `claim` replaces what the dump claims: a point for each aux slot in order, or for every slot.

    Raises WrongClaim, WrongTarget (also where no row of any slot fits: somebody else's dump has no digests to tell),
    TargetError, MissingIds, CannotCheck, DumpError, StoreError.
    """
    from eagle3.evidence.attribution import attribute

    if (reference or ("probe" if target is None else "target")) == "probe":
        compared = _probe(dump, settings)
    elif target is None:
        raise CannotCheck("no target was named: give its Hugging Face folder with --target DIR")
    else:
        params = TargetParams(path=target, trust_remote_code=trust_remote_code)
        compared = _target(dump, params, settings, accept=accept_target)
    claims, claimed_by = dump.claims(compared.reference.num_layers), dump.claimed_by
    if claim:
        claims, claimed_by = claims | _claims(dump, claim), "the command line"
    _check_depth(claims, claimed_by, compared, dump)
    chosen = _chosen(dump, compared.reference.sample_ids, settings)
    attribution = attribute(
        _first_rows(chosen, on_progress),
        claims,
        compared.reference,
        dtype=dump.dtype,
        model_class=compared.model_class,
        sent=dump.manifest.engine.ids if isinstance(dump, PublishedDump) else None,
    )
    alignment = None
    if isinstance(dump, OthersDump) and compared.target is not None:
        _check_related(attribution, compared.target, dump)
        alignment = _alignment(dump, compared.target, attribution)
    return AttributedDump(dump.where, dump.layout, claimed_by, attribution, alignment)


def _alignment(dump: OthersDump, target: "Target", attribution: "Attribution") -> "Check | None":
    """Do the tokens belong to the rows, by the slot that is the final state? None where no slot is.

    Our own dumps know how their text came about, and `validate` asks them more.
    """
    from eagle3.evidence.head import FinalStateParts
    from eagle3.evidence.text_alignment import judge_alignment

    final = {"norm": True, f"layers.{target.num_layers - 1}": False}
    slot = next((slot for slot in attribution.slots if str(slot.found) in final), None)
    if slot is None:
        return None
    samples = (dump.dump.sample(index).slots() for index in range(dump.num_samples))
    return judge_alignment(samples, slot.label, FinalStateParts.of(target), normed=final[str(slot.found)])


def _claims(dump: OpenedDump, claim: Sequence[CapturePoint]) -> dict[str, CapturePoint | None]:
    if len(claim) not in (dump.num_aux, len(dump.labels)):
        raise WrongClaim(
            f"{len(claim)} points are claimed ({', '.join(claim)}) for a dump of {', '.join(dump.labels)}: name "
            f"{dump.num_aux}, for the aux slots in order, or {len(dump.labels)}, with the final state"
        )
    return dict(zip(dump.labels, claim, strict=False))


def _check_depth(
    claims: Mapping[str, CapturePoint | None], claimed_by: str, compared: _Compared, dump: PublishedDump | OthersDump
) -> None:
    """WrongTarget where a slot is claimed to be of a layer that the target does not have."""
    from eagle3.evidence.attribution import WrongTarget

    num_layers = compared.reference.num_layers
    beyond = [point for point in claims.values() if point and (point.boundary or 0) > num_layers]
    if beyond:
        where = compared.target.path if compared.target else dump.where
        raise WrongTarget(
            f"{claimed_by} claims {', '.join(beyond)}, and the target {where} has {num_layers} decoder layers: it is "
            "another target, or the claim is mistyped"
        )


def _check_related(attribution: "Attribution", target: "Target", dump: OthersDump) -> None:
    """WrongTarget where the dump has nothing to do with the target: then no claim of it is refuted either."""
    from eagle3.evidence.attribution import WrongTarget

    slots = attribution.slots
    if all(slot.verdict == "refuted" and not slot.fits and slot.rows_fitting < SOME_ROWS for slot in slots):
        nearest = min(slots, key=lambda slot: slot.error)
        raise WrongTarget(
            f"{dump.where} is of another target than {target.path}: none of its {len(slots)} slots holds one of that "
            f"target's tensors (the nearest is {nearest.error:.2g} of a row's length away, and noise explains "
            f"{nearest.bound:.2g}). Give the folder that was served, in its revision; if this is it, the token ids are "
            "not those of the rows, or all rows were damaged"
        )


def _target(dump: PublishedDump | OthersDump, params: TargetParams, settings: Settings, *, accept: bool) -> _Compared:
    from eagle3.evidence.attribution import TargetReference, WrongTarget

    target = open_target(params, settings)
    if target.hidden_size != dump.hidden_size:
        raise WrongTarget(
            f"{target.path} has states of width {target.hidden_size}, the dump {dump.where} holds states of width "
            f"{dump.hidden_size}: it is another target. Give the folder that was served"
        )
    reference = TargetReference(target)
    if isinstance(dump, PublishedDump) and not accept:
        reference.check(dump.manifest.target)
    return _Compared(reference, target.model_class, target)


def _probe(dump: PublishedDump | OthersDump, settings: Settings) -> _Compared:
    from eagle3.evidence.references import ProbeReference

    probe = dump.probe(settings) if isinstance(dump, PublishedDump) else None
    if not isinstance(dump, PublishedDump) or probe is None:
        raise CannotCheck(
            f"{dump.where} has no probe, so its states can only be compared with the target itself: give its Hugging "
            "Face folder with --target DIR"
        )
    return _Compared(ProbeReference(probe), dump.manifest.target.model_class)


def _chosen(
    dump: PublishedDump | OthersDump, known: "Collection[str] | None", settings: Settings
) -> "Iterator[tuple[SlotSample, int]]":
    """Samples, and how many of their first tokens to look at; for a probe, those whose states it holds."""
    from eagle3.evidence.attribution_check import MAX_SAMPLES, TOKEN_BUDGET, choose_samples

    if isinstance(dump, OthersDump):
        # Where an answer begins is not known: as many samples as can be looked at whole, by the length of the first.
        whole = TOKEN_BUDGET // dump.dump.sample(0).rows
        places = _spread(dump.num_samples, max(2, min(whole, MAX_SAMPLES)))
        for index in places:
            yield dump.dump.sample(index).slots(), TOKEN_BUDGET // len(places)
        return
    with dump.reader([], settings) as reader:
        records = reader.records
    shards = list(dict.fromkeys(record.shard for record in records))
    used = {shards[place] for place in _spread(len(shards), MOST_SHARDS)}
    near = [index for index, record in enumerate(records) if known is not None or record.shard in used]
    chosen = {near[place]: tokens for place, tokens in choose_samples([records[index] for index in near], known)}
    for shard in dict.fromkeys(records[index].shard for index in chosen):
        with dump.reader([dump.manifest.shards[shard]], settings) as reader:
            for index, tokens in chosen.items():
                if records[index].shard == shard:
                    yield reader.read(index).slots(), tokens


def _spread(total: int, count: int) -> list[int]:
    """At most `count` places of range(total), evenly spread, both ends included."""
    if total <= count:
        return list(range(total))
    return [round(place * (total - 1) / (count - 1)) for place in range(count)]


def _first_rows(chosen: "Iterator[tuple[SlotSample, int]]", on_progress: Progress) -> "Iterator[SlotSample]":
    for number, (sample, tokens) in enumerate(chosen, start=1):
        on_progress(number, 0)
        yield sample.first(tokens)
