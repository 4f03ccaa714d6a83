"""Datasets as MLflow shows them: a dump, and a set of prompts.

MLflow keeps one dataset per experiment, name and digest, so the name is the URI: a copy elsewhere is another dataset.
A digest may have 36 characters there: it is the first 32 of the sha256, and the whole stands in the source.
"""

import json
from typing import Any, ClassVar, Self

from mlflow.data.dataset import Dataset
from mlflow.data.dataset_source import DatasetSource
from mlflow.data.dataset_source_registry import get_registered_sources, register_dataset_source
from mlflow.entities import Dataset as DatasetEntity
from mlflow.utils.validation import MAX_DATASET_NAME_SIZE, MAX_DATASET_SOURCE_SIZE
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.capture import CaptureSpec
from eagle3.conventions import EngineIds
from eagle3.dump.manifest import LiveCapture, Manifest
from eagle3.refs import DumpRef
from infra.lineage.errors import LineageError

DIGEST_CHARACTERS = 32


class DumpFacts(BaseModel):
    """What the dataset's source says of a dump. The walk believes none of it: it reads the manifest."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    uri: str
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    capture: CaptureSpec | None = None
    engine_ids: EngineIds | None = None
    live: LiveCapture | None = None


class DumpSource(DatasetSource):
    """A dump in S3. The type is MLflow's own "s3": its pages then offer the URI, which they take from the key `uri`."""

    source_type: ClassVar[str] = "s3"

    def __init__(self, facts: DumpFacts) -> None:
        self.facts = facts

    @classmethod
    def _get_source_type(cls) -> str:
        return cls.source_type

    def load(self) -> DumpRef:
        """The reference that the dump's own reader opens."""
        return DumpRef(uri=self.facts.uri, sha256=self.facts.manifest_sha256)

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:  # noqa: ARG004 - MLflow's signature
        return False  # a bare URI is not a dump: it names no digest

    @classmethod
    def _resolve(cls, raw_source: Any) -> Self:
        raise LineageError(f"a dump is named by its URI and its manifest's digest, not by {raw_source!r} alone")

    def to_dict(self) -> dict[str, Any]:
        return self.facts.model_dump(mode="json")

    @classmethod
    def from_dict(cls, source_dict: dict[Any, Any]) -> DatasetSource:
        """Read back. Sources of this type that are no dumps go to whoever was registered for the type before."""
        if "manifest_sha256" in source_dict:
            return cls(DumpFacts.model_validate(source_dict))
        others = [s for s in get_registered_sources() if s._get_source_type() == cls.source_type]
        return next(s for s in reversed(others) if not issubclass(s, DumpSource)).from_dict(source_dict)


class LocalDumpSource(DumpSource):
    """A dump in a folder (`file://`)."""

    source_type: ClassVar[str] = "local"


register_dataset_source(DumpSource)
register_dataset_source(LocalDumpSource)


class DumpDataset(Dataset):
    """A dump as MLflow's dataset: one schema row per capture point, named by it; none without a manifest."""

    def __init__(self, ref: DumpRef, manifest: Manifest | None = None) -> None:
        if manifest is not None and manifest.digest() != ref.sha256:
            raise LineageError(
                f"{ref.uri}: the reference names the manifest {ref.sha256}, this manifest's digest is "
                f"{manifest.digest()}: one of them belongs to another dump"
            )
        if len(ref.uri) > MAX_DATASET_NAME_SIZE:
            raise LineageError(f"the dump's URI has {len(ref.uri)} characters, MLflow keeps {MAX_DATASET_NAME_SIZE}")
        self._manifest = manifest
        facts = DumpFacts(
            uri=ref.uri,
            manifest_sha256=ref.sha256,
            capture=manifest.spec if manifest else None,
            engine_ids=manifest.engine.ids if manifest else None,
            live=manifest.engine.live if manifest else None,
        )
        source = DumpSource(facts) if ref.uri.startswith("s3://") else LocalDumpSource(facts)
        if len(source.to_json()) > MAX_DATASET_SOURCE_SIZE:
            raise LineageError(f"{ref.uri}: its description exceeds MLflow's {MAX_DATASET_SOURCE_SIZE} characters")
        super().__init__(source=source, name=ref.uri)

    def _compute_digest(self) -> str:
        return str(self.source.facts.manifest_sha256[:DIGEST_CHARACTERS])

    @property
    def schema(self) -> list[dict[str, Any]] | None:
        if self._manifest is None:
            return None
        dtype = self._manifest.dtype
        return [{"name": str(point), "type": dtype, "required": True} for point in self._manifest.spec.points]

    @property
    def profile(self) -> dict[str, Any] | None:
        if (m := self._manifest) is None:
            return None
        return {
            "num_samples": m.num_samples,
            "num_tokens": m.num_tokens,
            "num_shards": len(m.shards),
            "num_bytes": sum(shard.bytes for shard in m.shards),
        }

    def to_dict(self) -> dict[str, str]:
        described = super().to_dict()
        if self.schema is not None:
            described |= {"schema": json.dumps({"mlflow_colspec": self.schema}), "profile": json.dumps(self.profile)}
        return described

    def entity(self) -> DatasetEntity:
        return DatasetEntity(**self.to_dict())


class PromptSet(BaseModel):
    """The prompts of a benchmark: a name for people and the digest of their bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=MAX_DATASET_NAME_SIZE, examples=["word-problems/heldout"])
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    def entity(self) -> DatasetEntity:
        source = json.dumps({"name": self.name, "sha256": self.sha256})
        return DatasetEntity(
            name=self.name, digest=self.sha256[:DIGEST_CHARACTERS], source_type="prompts", source=source
        )


def names_dump(dataset: DatasetEntity, dump: DumpRef) -> bool:
    """Whether a run's dataset is this very dump: URI and whole digest."""
    facts = dump_facts(dataset)
    return facts is not None and (facts.uri, facts.manifest_sha256) == (dump.uri, dump.sha256)


def dump_facts(dataset: DatasetEntity) -> DumpFacts | None:
    """What a run's dataset says, None where it is not a dump."""
    try:
        return DumpFacts.model_validate_json(dataset.source)
    except ValidationError:
        return None
