"""The manifest: what a dump says of itself. It is written last; a dump without one does not exist."""

import re
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from eagle3.capture import CaptureSpec
from eagle3.conventions import EngineIds
from eagle3.digests import canonical_json, sha256_bytes
from eagle3.errors import Eagle3Error, first_fault

SCHEMA_VERSION: Final = 2
MANIFEST_NAME = "manifest.json"
SAMPLES_NAME = "samples.jsonl"
MAX_MANIFEST_BYTES = 64 * 2**20

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class DumpError(Eagle3Error, ValueError):
    """A dump that cannot be written or read as it is."""


class ManifestError(DumpError):
    """A manifest that cannot be read: not JSON, another schema version, a field that is missing or wrong."""


def plain_file_name(name: str) -> str:
    """A name inside the dump's own prefix: no separator, no parent, nothing hidden."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a plain file name inside the dump")
    return name


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Model):
    """A file of the dump."""

    name: Annotated[str, AfterValidator(plain_file_name)]
    bytes: int = Field(ge=0)
    sha256: Sha256


class ShardEntry(FileEntry):
    """A safetensors file that packs whole samples."""

    samples: int = Field(gt=0)
    tokens: int = Field(gt=0)


class TargetIdentity(_Model):
    """The model whose states were captured."""

    name: str
    revision: str | None = None
    model_class: str = Field(description="`architectures[0]` of its config.json")
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    config_sha256: Sha256
    weights_sha256: Sha256 = Field(description="Merkle digest over its weight files")


class TokenizerIdentity(_Model):
    sha256: Sha256 = Field(description="Digest over the tokenizer's files")
    chat_template_sha256: Sha256 | None = None
    remote_code: bool = False


class LiveCapture(_Model):
    """What the tap saw in the running model: evidence about the capture list, not a claim."""

    model_class: str
    layers_to_capture: tuple[int, ...] = Field(description="Boundaries, as the live model held them")
    tap_version: str


class EngineRecord(_Model):
    """The engine that served the target, and how."""

    name: Literal["sglang"] = "sglang"
    version: str
    ids: EngineIds = Field(description="The ids that were sent, beside their convention")
    live: LiveCapture
    flags: dict[str, Any] = Field(description="Every server flag that changes the states, as the server reported it")


class Generation(_Model):
    """How the answers came about."""

    source: Literal["while_answering", "answer_then_prefill"]
    temperature: float = 0.0
    max_new_tokens: int = Field(gt=0)
    ignore_eos: bool = False


class SampleRecord(_Model):
    """One line of samples.jsonl: where a sample lies and what it must be.

    Rows are token positions 0 .. prompt_tokens + output_tokens - 2: row i is the state after reading token i, so the
    last token of the answer has no row; its id is kept here.
    """

    id: str = Field(min_length=1, max_length=200)
    shard: int = Field(ge=0, description="Index into the manifest's shards")
    start: int = Field(ge=0, description="First row inside the shard")
    rows: int = Field(gt=0)
    prompt_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    last_token_id: int = Field(ge=0)
    finish_reason: str = Field(max_length=200)
    ids_sha256: Sha256 = Field(description="sha256_ids over prompt and answer, the last token included")
    digest: Sha256 = Field(
        description="`eagle3.dump.content.sample_digest`: ids, answer's place, every captured tensor"
    )


class Manifest(_Model):
    """Everything that a dump says of itself. Its digest is the artifact's identity."""

    schema_version: Literal[2] = SCHEMA_VERSION
    created_at: datetime
    spec: CaptureSpec
    spec_digest: Sha256 = Field(description="What was asked: capture, target, tokenizer, prompts, generation")
    content_digest: Sha256 = Field(description="Merkle root over the samples' digests in order of id, however packed")
    dtype: Literal["float32", "bfloat16", "float16"]
    target: TargetIdentity
    tokenizer: TokenizerIdentity
    engine: EngineRecord
    prompts_sha256: Sha256
    generation: Generation
    num_samples: int = Field(gt=0)
    num_tokens: int = Field(gt=0, description="Rows of all samples")
    shards: tuple[ShardEntry, ...] = Field(min_length=1)
    samples: FileEntry
    probe: FileEntry | None = Field(
        default=None, description="`eagle3.dump.probe`; None where the server could not be probed"
    )
    packages: dict[str, str]
    git_commit: str | None = None

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file of the dump but the manifest itself, the small ones first."""
        return (self.samples, *([self.probe] if self.probe else []), *self.shards)

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        """sha256 of the canonical JSON: this artifact, and what a DumpRef carries."""
        return sha256_bytes(self.canonical())

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> Self:
        """Read a manifest; `where` is named in the error."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{where}: a manifest of {len(data)} bytes is refused (limit {MAX_MANIFEST_BYTES})")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise ManifestError(f"{where}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    field, what = first_fault(error)
    if field == "schema_version":
        return (
            f"a manifest of schema version {error.errors()[0]['input']!r}; this software reads version {SCHEMA_VERSION}"
        )
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"not a valid manifest: {field}: {what}{more}"


def spec_digest(
    spec: CaptureSpec,
    target: TargetIdentity,
    tokenizer: TokenizerIdentity,
    prompts_sha256: str,
    generation: Generation,
) -> str:
    """What was asked, before anything was captured: the key under which an extraction is resumed."""
    parts = {
        "spec": spec.model_dump(mode="json"),
        "target": target.model_dump(mode="json"),
        "tokenizer": tokenizer.model_dump(mode="json"),
        "prompts": prompts_sha256,
        "generation": generation.model_dump(mode="json"),
    }
    return sha256_bytes(canonical_json(parts))
