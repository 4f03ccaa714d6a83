"""What every engine's file of this package speaks: integers beside the name of their convention, and its errors."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field

from eagle3.capture import CapturePoint, check_points
from eagle3.errors import Eagle3Error

MISSPELT = 0.9
"""Likeness from which an unknown model class is taken for a misspelt one: most names end in ForCausalLM."""
STATES_SETTLE = "Capture a few states and let `eagle3 dump attribute` say which layers they are."
LIVE_LIST_SETTLES = (
    "The live model settles it: start it with the tap, take the layers_to_capture that its record shows, and give them "
    "to `eagle3 layers --live-list`."
)


class ConventionError(Eagle3Error, ValueError):
    """An engine, version, model class or id list whose meaning is not known, or that cannot be expressed."""


class EngineIds(BaseModel):
    """An engine's layer ids. The integers alone mean nothing: the engine, its version and the model class decide."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str = Field(examples=["sglang"])
    version: str = Field(examples=["0.5.23"])
    model_class: str = Field(description="Class name as the engine's config names it", examples=["LlamaForCausalLM"])
    ids: tuple[int, ...] = Field(examples=[[2, 15, 27]])

    def __str__(self) -> str:
        return f"{self.engine} {self.version} {self.model_class} {list(self.ids)}"


class Convention(ABC):
    """What one engine's layer ids mean. Subclasses say what an id captures; order, repeats and the way back
    are here."""

    engine: str
    title: str
    field: str
    """Where the engine reads the ids."""
    final: str
    """What the engine hands over as its final hidden state, in words: `after` or `before` the final norm, or both."""
    source: str
    releases: tuple[str, ...]
    """The releases (or commits) in order of time whose meaning was read or run: nothing is claimed of others."""
    settles = STATES_SETTLE
    """What settles the meaning where version or model class is not known."""
    takes_ids = True
    """False: the layers are written in the engine's code, and there is nothing to set."""
    keeps_order = False
    """True: delivered in the order of the ids. False: in the order of the layers, whatever the order of the ids."""

    @property
    def newest(self) -> str:
        return self.releases[-1]

    def known_model_classes(self, version: str) -> tuple[str, ...] | None:
        """The model classes whose ids are known in that version; None: the id means the same for every class."""
        self.release(version)
        return None

    @abstractmethod
    def captured(self, version: str, model_class: str, ids: Sequence[int], num_layers: int) -> tuple[CapturePoint, ...]:
        """What each id captures, in the order of the ids; ConventionError where one captures nothing or fails."""

    @abstractmethod
    def default(self, version: str, model_class: str, num_layers: int) -> tuple[CapturePoint, ...]:
        """What the engine captures, in delivered order, where it is given no ids."""

    @abstractmethod
    def candidates(self, points: tuple[CapturePoint, ...], num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Id lists that may capture these points, the likeliest first; each is checked by going back."""

    def to_points(self, engine_ids: EngineIds, num_layers: int) -> tuple[CapturePoint, ...]:
        """The captured points in **delivered** order."""
        if not engine_ids.ids:
            raise ConventionError("an empty id list captures nothing: name at least one layer")
        self.check(engine_ids.version, engine_ids.model_class)
        points = self.captured(engine_ids.version, engine_ids.model_class, engine_ids.ids, num_layers)
        twice = sorted({p for p in points if points.count(p) > 1}, key=points.index)
        if twice:
            raise ConventionError(
                f"{engine_ids} names {', '.join(twice)} twice; {self.title} delivers it once, or refuses: a drafter "
                f"would get {len(set(points))} state{'s' if len(set(points)) > 1 else ''} instead of {len(points)}"
            )
        return points if self.keeps_order else in_order(points)

    def to_ids(self, points: Iterable[CapturePoint], version: str, model_class: str, num_layers: int) -> EngineIds:
        """The ids that make the engine deliver exactly these points in this order; checked by going back."""
        wanted = tuple(points)
        self.check(version, model_class)
        check_points(wanted, num_layers)
        if not self.keeps_order and wanted != in_order(wanted):
            raise ConventionError(
                f"{self.title} delivers captured states in the order of the layers, whatever the order of the ids; "
                f"{', '.join(wanted)} cannot be had. Possible: {', '.join(in_order(wanted))}"
            )
        tried, reason = [], ""
        for ids in self.candidates(wanted, num_layers):
            candidate = EngineIds(engine=self.engine, version=version, model_class=model_class, ids=ids)
            tried.append(list(ids))
            try:
                if self.to_points(candidate, num_layers) == wanted:
                    return candidate
            except ConventionError as error:
                reason = reason or f": {error}"
        on = "" if self.known_model_classes(version) is None else f" on {model_class}"
        raise ConventionError(
            f"{self.title} {version} has no id list for {', '.join(wanted)}{on} with {num_layers} layers: "
            f"{' and '.join(map(str, tried))} would be tried, and none leads back to these points{reason}"
        )

    def check(self, version: str, model_class: str) -> None:
        """Refuse a version or a model class whose meaning is not known."""
        known = self.known_model_classes(version)
        if known is not None and model_class not in known:
            near = difflib.get_close_matches(model_class, known, n=1, cutoff=MISSPELT)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise ConventionError(
                f"what layer ids mean for {model_class} in {self.title} {version} was not checked.{meant} "
                f"{self.settles} Known are {', '.join(known)}."
            )

    def release(self, version: str) -> Version:
        """One of the known versions; a fork's `+gitabc` or a release candidate is refused: nobody knows its meaning."""
        return checked_release(version, self.title, self.releases, self.settles)


class CommitConvention(Convention):
    """An engine that was read at commits of its repository, not in releases: its versions here are those commits."""

    def release(self, version: str) -> Version:
        if not any(len(version) >= 7 and version.startswith(commit) for commit in self.releases):
            raise ConventionError(
                f"{self.title} was read at commit {' and '.join(self.releases)}, not at {version!r}: look whether "
                f"{self.field} means the same there. {self.settles}"
            )
        return Version("0")


def checked_release(text: str, title: str, releases: Sequence[str], settles: str) -> Version:
    try:
        version = Version(text)
    except InvalidVersion:
        raise ConventionError(f"{text!r} is not a version of {title}: expected one like {releases[-1]}") from None
    if version.local or version.is_prerelease:
        raise ConventionError(f"{title} {text} is not a release: what its layer ids mean is not known. {settles}")
    if version not in map(Version, releases):
        between = Version(releases[0]) < version < Version(releases[-1])
        known = f"are {', '.join(releases)}" if between else f"are {releases[0]} to {releases[-1]}"
        known = known if len(releases) > 1 else f"is {releases[0]}"
        raise ConventionError(f"what layer ids mean in {title} {text} was not checked: known {known}. {settles}")
    return version


def in_order(points: Iterable[CapturePoint]) -> tuple[CapturePoint, ...]:
    """Points in the order in which a forward pass meets them."""
    return tuple(sorted(points, key=lambda p: 1 << 30 if p.boundary is None else p.boundary))


def shifted(
    ids: Sequence[int], num_layers: int, *, shift: int, lowest: int, highest: int, title: str, what: str
) -> tuple[CapturePoint, ...]:
    """Points of ids that mean boundary id + shift, for boundaries `lowest` ... `highest`; outside raises."""
    outside = [i for i in ids if not lowest <= i + shift <= highest]
    if outside:
        raise ConventionError(
            f"{title} captures nothing for {outside} on {num_layers} layers: an id is {what}, from {lowest - shift} to "
            f"{highest - shift}"
        )
    return tuple(CapturePoint.at_boundary(i + shift) for i in ids)


def unshifted(points: Iterable[CapturePoint], shift: int, title: str) -> tuple[int, ...]:
    """Ids of points where id = boundary - shift; `norm` is no boundary and raises."""
    boundaries = [(p, p.boundary) for p in points]
    off_stream = [p for p, boundary in boundaries if boundary is None]
    if off_stream:
        raise ConventionError(
            f"{title} cannot capture {', '.join(off_stream)} as a slot: it captures the residual stream at a layer. "
            "The final state comes with every capture and needs no id."
        )
    return tuple(boundary - shift for _, boundary in boundaries if boundary is not None)


def usual_default(num_layers: int, title: str, instead: str = "Name the ids explicitly.") -> tuple[CapturePoint, ...]:
    """`[1, N//2-1, N-4]` as outputs = boundaries 2, N//2, N-3: what nearly every engine falls back to.

    `instead` says what to do where the target has too few layers for it.
    """
    boundaries = (2, num_layers // 2, num_layers - 3)
    if not 2 < boundaries[1] < boundaries[2]:
        raise ConventionError(
            f"{title}'s default needs more layers: for {num_layers} it would be boundaries {list(boundaries)}, which "
            f"are not three different ones in order. {instead}"
        )
    return tuple(CapturePoint.at_boundary(b) for b in boundaries)
