"""What every engine's file of this package speaks: integers beside the name of their convention, and its errors."""

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field

from eagle3.errors import Eagle3Error


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


def parse_version(text: str, engine: str) -> Version:
    """A version of an engine; a local part (a fork's `+gitabc`) is refused, because nobody knows its meaning."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise ConventionError(f"{text!r} is not a version of {engine}: expected one like 0.5.23") from None
    if version.local or version.is_devrelease:
        raise ConventionError(
            f"{engine} {text} is not a release: what its layer ids mean is not known. Start it with the tap and take "
            "the capture list that the live model itself reports."
        )
    return version
