"""What was answered, kept beside the states: a file of JSON lines for each shard, a line for each of its samples."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.digests import canonical_json, sha256_file
from eagle3.dump.files import named_file, publish
from eagle3.dump.manifest import DumpError, FileEntry, SampleRecord, ShardEntry
from eagle3.errors import first_fault

MAX_LINE_BYTES = 64 * 2**20


class Answer(BaseModel):
    """One answer of a sample: the tokens of one of its spans, in the order of `SampleRecord.answer_spans`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_ids: tuple[int, ...]
    text: str = Field(description="Without special tokens")


class KeptAnswers(BaseModel):
    """One line: what the target answered in a sample, or what was given to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    finish_reason: str
    cut: bool = Field(description="Whether a length cap cut it")
    answers: tuple[Answer, ...] = Field(min_length=1)


def answers_of(record: SampleRecord, ids: Sequence[int], texts: Sequence[str]) -> KeptAnswers:
    """ids: all token ids of the sample, the last one too; a text for each of its spans."""
    return KeptAnswers(
        id=record.id,
        finish_reason=record.finish_reason,
        cut=record.finish_reason == "length",
        answers=tuple(
            Answer(token_ids=tuple(ids[start:end]), text=text)
            for (start, end), text in zip(record.answer_spans, texts, strict=True)
        ),
    )


def answers_path(shard: Path) -> Path:
    """Where the answers of a shard lie: `shard-00000.answers.jsonl`."""
    return shard.with_name(f"{shard.name.removesuffix('.safetensors')}.answers.jsonl")


def write_answers(path: Path, kept: Sequence[KeptAnswers]) -> FileEntry:
    """Publish the answers of a shard's samples, in their order. DumpError where the disk refuses."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(canonical_json(answer.model_dump(mode="json")) + b"\n" for answer in kept)

    publish(path, write)
    return FileEntry(name=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))


def read_answers(folder: Path, shard: ShardEntry) -> list[KeptAnswers]:
    """The answers of a shard's samples; empty where the dump keeps none.

    Raises DumpError where the file is not the one that the manifest names, or does not fit the shard.
    """
    if shard.answers is None:
        return []
    path = named_file(folder, shard.answers)
    kept: list[KeptAnswers] = []
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            try:
                kept.append(KeptAnswers.model_validate_json(line))
            except ValidationError as error:
                field, what = first_fault(error, "the line")
                raise DumpError(f"{path}, line {len(kept) + 1}: {field}: {what}") from None
    if len(kept) != shard.samples:
        raise DumpError(f"{path} holds answers of {len(kept)} samples; {shard.name} has {shard.samples}")
    return kept
