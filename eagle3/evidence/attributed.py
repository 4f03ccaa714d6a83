"""The result of an attribution: for every slot of a dump, which tensor of the target it really is."""

from typing import Literal

from pydantic import Field

from eagle3.capture import CapturePoint
from eagle3.evidence.measured import EvidenceModel, Measured

SlotVerdict = Literal["proven", "refuted", "undecided"]


class Candidate(EvidenceModel):
    """A tensor that a slot may hold: scale * norm(...norm(point)) with the rows of t + shift, or rows of one length."""

    point: CapturePoint
    norms: int = Field(default=0, description="How often the final norm was applied on top of the point's own state")
    shift: int = Field(default=0, description="Row t holds the state of token t + shift: -1 is one row late")
    scale: Measured = Field(default=1.0, description="Factor of the best fit; 1 where no scaling is needed")
    length: Measured | None = Field(
        default=None, description="Each row was scaled to this length, as a norm without weights does; None: none was"
    )

    def __str__(self) -> str:
        name = str(self.point)
        if self.point == "norm" and self.norms:
            name = f"norm with the final norm applied {self.norms} more time{'s' if self.norms > 1 else ''}"
        elif self.norms:
            name = f"{self.point} after the final norm"
        if self.scale != 1:
            name = f"{self.scale:.3g} x {name}"
        if self.length is not None:
            name += f" with every row scaled to length {self.length:.3g}"
        if self.shift:
            name += f", {shift_in_words(self.shift)}"
        return name

    @property
    def is_plain(self) -> bool:
        """The point's own state: neither shifted, scaled, normed nor brought to one length."""
        return self == Candidate(point=self.point)


def shift_in_words(shift: int) -> str:
    """`1 row late` for -1: row t holds the state of token t + shift."""
    return f"{abs(shift)} row{'s' if abs(shift) > 1 else ''} {'late' if shift < 0 else 'early'}"


class SlotAttribution(EvidenceModel):
    """One slot: what it claims to be, what it is, and how sure that is. Errors are medians over rows of
    |row - candidate| / |row|."""

    label: str = Field(description="The slot's name in the dump; a capture point's name in our own dumps")
    claimed: CapturePoint | None = Field(description="None where the dump claims nothing")
    found: Candidate = Field(description="The nearest candidate")
    error: Measured = Field(description="Distance to `found`")
    claimed_error: Measured | None = Field(description="Distance to what was claimed")
    claimed_bound: Measured | None = Field(default=None, description="The largest error that noise explains there")
    runner_up: Candidate = Field(description="The nearest candidate after `found`")
    runner_up_error: Measured
    bound: Measured = Field(description="The largest error that noise explains at `found`, from the calibration")
    rows_fitting: Measured = Field(description="Share of the rows that fit `found` one by one")
    verdict: SlotVerdict
    errors: dict[CapturePoint, Measured] = Field(description="Distance to every point of the target, unshifted")
    sentence: str

    @property
    def fits(self) -> bool:
        """Whether `found` is what the slot holds, and not just the nearest that there is."""
        return self.error <= self.bound


class SampleFinding(EvidenceModel):
    """A sample whose rows do not fit where the other samples' rows do."""

    sample: str
    label: str
    error: Measured = Field(description="Median error of its rows at what the slot is in the other samples")
    sentence: str


class Attribution(EvidenceModel):
    """Every slot of a dump against every boundary of the target."""

    reference: str = Field(description="What was compared with: `target` or `probe`")
    num_layers: int
    samples: int = Field(description="Samples that were looked at")
    rows: int = Field(description="Rows that were compared, of all these samples")
    answer_rows: int = Field(default=0, description="Of these, the rows of answers, where it is known which they are")
    slots: tuple[SlotAttribution, ...]
    misfits: tuple[SampleFinding, ...] = ()
    remarks: tuple[str, ...] = Field(default=(), description="What is worth a look although the labels are right")
    causes: tuple[str, ...] = Field(default=(), description="What explains the slots that are refuted; likeliest first")
    profile: dict[CapturePoint, Measured] = Field(
        default={}, description="The reference's median row norm at every point, over the compared rows"
    )

    @property
    def verdict(self) -> SlotVerdict:
        """`refuted` where a slot or a sample is; `undecided` where a slot could not be decided."""
        verdicts = {slot.verdict for slot in self.slots}
        if "refuted" in verdicts or self.misfits:
            return "refuted"
        return "undecided" if "undecided" in verdicts or not self.slots else "proven"
