"""What a dump is, in numbers and words, without a judgement."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from eagle3.dump.manifest import Manifest
from eagle3.evidence.report import Check
from eagle3.evidence.statistics import RowStatistics
from infra.settings import Settings
from tasks.dumps import OthersDump, Progress, PublishedDump

if TYPE_CHECKING:
    import torch

    from eagle3.evidence.row_measure import RowMeasure


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class DescribedSlot(_Model):
    """A slot of a dump."""

    label: str
    claim: str | None = Field(description="What is claimed of it; None: nothing")
    statistics: RowStatistics | None = Field(description="Its rows in numbers, where they were asked for")


class Description(_Model):
    """What a dump is."""

    where: str
    layout: str
    made_by: str
    claimed_by: str
    num_samples: int
    num_tokens: int
    num_with_ids: int = Field(description="Samples that come with their token ids")
    hidden_size: int
    dtype: str
    slots: tuple[DescribedSlot, ...]
    manifest: Manifest | None = Field(description="Of our own dumps")
    checks: tuple[Check, ...] = Field(description="Of our own dumps: what the live model captured, what the ids mean")


def describe(
    dump: PublishedDump | OthersDump, settings: Settings, *, statistics: bool, on_progress: Progress
) -> Description:
    """What the dump is. With `statistics` every row is read; without, only what says what there is.

    Raises DumpError or StoreError where a file that is read is damaged.
    """
    measures: dict[str, RowMeasure] = {}
    checks: tuple[Check, ...] = ()
    if isinstance(dump, PublishedDump):
        from eagle3.evidence.capture_list import check_capture_list, check_engine_ids

        manifest: Manifest | None = dump.manifest
        checks = (check_capture_list(dump.manifest), check_engine_ids(dump.manifest))
        tokens, with_ids = dump.manifest.num_tokens, dump.num_samples
        if statistics:
            for number, sample in enumerate(dump.samples(settings), start=1):
                _measure(sample.states, dump.dtype, measures)
                on_progress(number, dump.num_samples)
    else:
        manifest, tokens, with_ids = None, 0, 0
        for number, foreign in enumerate(dump.dump, start=1):
            tokens += foreign.rows
            with_ids += foreign.input_ids is not None
            if statistics:
                _measure(foreign.states, dump.dtype, measures)
            on_progress(number, dump.num_samples)
    slots = tuple(
        DescribedSlot(
            label=label,
            claim=dump.claim_in_words(label),
            statistics=RowStatistics.model_validate(measures[label].measures()) if label in measures else None,
        )
        for label in dump.labels
    )
    return Description(
        where=dump.where,
        layout=dump.layout,
        made_by=dump.made_by,
        claimed_by=dump.claimed_by,
        num_samples=dump.num_samples,
        num_tokens=tokens,
        num_with_ids=with_ids,
        hidden_size=dump.hidden_size,
        dtype=dump.dtype,
        slots=slots,
        manifest=manifest,
        checks=checks,
    )


def _measure(states: "Mapping[str, torch.Tensor]", dtype: str, measures: "dict[str, RowMeasure]") -> None:
    from eagle3.dump.content import DTYPES
    from eagle3.evidence.row_measure import RowMeasure

    for label, state in states.items():
        measures.setdefault(label, RowMeasure(state.shape[1], DTYPES[dtype])).see(state)
