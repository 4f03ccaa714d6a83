"""The manifest: what a dump says of itself. It is written last; a dump without one does not exist."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3.capture import CaptureSpec
from eagle3.conventions import EngineIds
from eagle3.conversations import MAX_SPANS, GivenSettings
from eagle3.digests import canonical_json, sha256_bytes
from eagle3.errors import Eagle3Error, first_fault

SCHEMA_VERSION: Final = 3
MANIFEST_NAME = "manifest.json"
SAMPLES_NAME = "samples.jsonl"
MAX_MANIFEST_BYTES = 64 * 2**20
# Fields that a manifest of version 2 has not: its digest does not cover them.
_SINCE_3: Any = {"num_cut": True, "generation": {"given": True}, "shards": {"__all__": {"answers": True}}}

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
    answers: FileEntry | None = Field(
        default=None, description="`eagle3.dump.answers`: what was answered in its samples, as ids and text"
    )


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

    source: Literal["while_answering", "answer_then_prefill", "given"]
    temperature: float = 0.0
    max_new_tokens: int | None = Field(gt=0, description="None where the answers were given")
    ignore_eos: bool = False
    given: GivenSettings | None = Field(default=None, description="How given conversations were made into tokens")

    @model_validator(mode="after")
    def _is_given_or_generated(self) -> Self:
        if (self.source == "given", self.max_new_tokens is None) != (self.given is not None,) * 2:
            raise ValueError("source `given` has `given` and no `max_new_tokens`; the others the other way round")
        return self


class SampleRecord(_Model):
    """One line of samples.jsonl: where a sample lies and what it must be.

    Rows are token positions 0 .. prompt_tokens + output_tokens - 2: row i is the state after reading token i, so the
    last token of the answer has no row; its id is kept here.

    In a conversation of several turns the answers are `spans`, and the last token is that of the last one.
    """

    id: str = Field(min_length=1, max_length=200)
    shard: int = Field(ge=0, description="Index into the manifest's shards")
    start: int = Field(ge=0, description="First row inside the shard")
    rows: int = Field(gt=0)
    prompt_tokens: int = Field(gt=0, description="Tokens before the first one of an answer")
    output_tokens: int = Field(gt=0, description="Tokens from there on")
    last_token_id: int = Field(ge=0)
    finish_reason: str = Field(max_length=200, description='"length" where a cap cut it')
    spans: tuple[tuple[int, int], ...] = Field(
        default=(),
        max_length=MAX_SPANS,
        description="Tokens [start, end) under the loss; empty: everything after the prompt",
    )
    left_out: int = Field(default=0, ge=0, description="Messages of a given conversation beyond the length cap")
    ids_sha256: Sha256 = Field(description="sha256_ids over prompt and answer, the last token included")
    digest: Sha256 = Field(
        description="`eagle3.dump.content.sample_digest`: ids, answer's place, every captured tensor"
    )

    @model_validator(mode="after")
    def _spans_are_in_order(self) -> Self:
        if wrong := wrong_spans(self.spans, self.prompt_tokens, self.output_tokens):
            raise ValueError(wrong)
        return self

    @property
    def answer_spans(self) -> tuple[tuple[int, int], ...]:
        """Tokens [start, end) of every answer: at least one."""
        return self.spans or ((self.prompt_tokens, self.prompt_tokens + self.output_tokens),)


class Manifest(_Model):
    """Everything that a dump says of itself. Its digest is the artifact's identity."""

    schema_version: Literal[2, 3] = SCHEMA_VERSION
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
    num_cut: int = Field(default=0, ge=0, description="Samples that a length cap cut: finish_reason `length`")
    shards: tuple[ShardEntry, ...] = Field(min_length=1)
    samples: FileEntry
    probe: FileEntry | None = Field(
        default=None, description="`eagle3.dump.probe`; None where the server could not be probed"
    )
    packages: dict[str, str]
    git_commit: str | None = None

    @model_validator(mode="after")
    def _version_2_has_nothing_newer(self) -> Self:
        if self.schema_version == 2 and (self.num_cut or self.generation.given or any(s.answers for s in self.shards)):
            raise ValueError("num_cut, answers and given conversations came with version 3; this says 2")
        return self

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file of the dump but the manifest itself, the small ones first."""
        answers = [shard.answers for shard in self.shards if shard.answers]
        return (self.samples, *([self.probe] if self.probe else []), *answers, *self.shards)

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json", exclude=_SINCE_3 if self.schema_version == 2 else None))

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
            f"a manifest of schema version {error.errors()[0]['input']!r}; this software reads versions 2 and "
            f"{SCHEMA_VERSION}"
        )
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"not a valid manifest: {field}: {what}{more}"


def wrong_spans(spans: Sequence[tuple[int, int]], prompt_tokens: int, output_tokens: int) -> str:
    """What is wrong with the places of a sample's answers; "" where nothing is, or where there is one answer only."""
    end = prompt_tokens + output_tokens
    edges = [edge for span in spans for edge in span]
    if (
        all(a < b for a, b in spans)
        and edges == sorted(edges)
        and (not edges or (edges[0], edges[-1]) == (prompt_tokens, end))
    ):
        return ""
    came = f"{list(spans)!s:.200}"
    return f"spans must be in order, not empty, and reach from token {prompt_tokens} to {end}; they are {came}"


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
        "generation": generation.model_dump(mode="json", exclude_none=True),
    }
    return sha256_bytes(canonical_json(parts))
