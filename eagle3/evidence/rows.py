"""Is there a row for every token, and is it the token that was recorded?"""

import torch

from eagle3.digests import sha256_ids
from eagle3.dump.answers import KeptAnswers, read_answers
from eagle3.dump.content import loss_mask
from eagle3.dump.manifest import DumpError, Manifest
from eagle3.dump.reader import DumpReader, Sample
from eagle3.evidence.examination import Findings
from eagle3.evidence.report import Check


class Completeness:
    """`completeness`: rows = prompt + output - 1 for every sample, and shards that say the same of their packing."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._samples, self._rows, self._tokens = 0, 0, 0
        self._wrong = Findings()
        self._without_prompt = 0

    def see_shard(self, reader: DumpReader, shard: int) -> None:
        """`cu_seqlens` of a shard against the starts and rows of samples.jsonl."""
        rows = [reader.records[i].rows for i in reader.samples_of(shard)]
        expected = torch.tensor([0, *rows]).cumsum(0)
        try:
            if not torch.equal(reader.cu_seqlens(shard), expected):
                self._wrong.add(f"cu_seqlens of {self._manifest.shards[shard].name} is not that of samples.jsonl")
        except DumpError as error:
            self._wrong.add(str(error))

    def see(self, sample: Sample) -> None:
        record = sample.record
        expected = record.prompt_tokens + record.output_tokens - 1
        self._samples += 1
        self._rows += record.rows
        self._tokens += expected
        if not record.rows == expected == len(sample.input_ids):
            self._wrong.add(f"sample {sample.id!r} has {record.rows} rows for {expected} tokens")
            # With the row that predicts the answer's first token, or without it.
            self._without_prompt += record.rows in (record.output_tokens - 1, record.output_tokens)

    def conclude(self) -> list[Check]:
        sentence = "Every token that the target read has its row."
        if self._wrong.count:
            cache_off = self._manifest.engine.flags.get("disable_radix_cache")
            begins = f"{self._without_prompt} of them have rows for the answer only: those of the prompt are missing. "
            sentence = (
                f"Rows are missing or doubled: {self._wrong}. {begins if self._without_prompt else ''}"
                f"Usual causes: a prefix cache that answered for the "
                f"target (disable_radix_cache was {cache_off}), chunked prefill that kept the last chunk only, a "
                "request that was cut. Start the server with the radix cache off and extract these samples again."
            )
        return [
            Check(
                name="completeness",
                verdict="fail" if self._wrong.count else "pass",
                value=f"{self._rows} rows for {self._tokens} tokens, {self._samples} samples",
                threshold=f"prompt + output - 1 rows each, {self._manifest.num_samples} samples",
                sentence=sentence,
            )
        ]


class TokenIds:
    """`token_ids`: ids as hashed at capture and inside the vocabulary; a loss mask that marks the answers, and kept
    answers that are these."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._vocab_size = manifest.target.vocab_size
        self._rows, self._answer_rows = 0, 0
        self._wrong = Findings()
        self._kept: dict[str, KeptAnswers] = {}  # of the shard whose samples come

    def see_shard(self, reader: DumpReader, shard: int) -> None:
        """The answers that are kept beside a shard, where they are; its samples come next."""
        self._kept = {}
        try:
            self._kept = {kept.id: kept for kept in read_answers(reader.folder, self._manifest.shards[shard])}
        except DumpError as error:
            self._wrong.add(str(error))

    def see(self, sample: Sample) -> None:
        record, ids = sample.record, sample.full_ids()
        if sha256_ids(ids.tolist()) != record.ids_sha256:
            self._wrong.add(f"sample {sample.id!r}: its ids are not those that were hashed at capture")
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            self._wrong.add(f"sample {sample.id!r}: id {int(outside[0])} is outside 0 ... {self._vocab_size - 1}")
        if not torch.equal(sample.loss_mask, loss_mask(record)):
            self._wrong.add(f"sample {sample.id!r}: the loss mask does not mark its answers")
        self._see_answers(sample, ids)
        self._rows += record.rows
        self._answer_rows += int(sample.loss_mask.sum())

    def _see_answers(self, sample: Sample, ids: torch.Tensor) -> None:
        record = sample.record
        if self._manifest.shards[record.shard].answers is None:
            return
        kept = self._kept.get(sample.id)
        places = [tuple(ids[start:end].tolist()) for start, end in record.answer_spans]
        if kept is None or [answer.token_ids for answer in kept.answers] != places:
            self._wrong.add(f"sample {sample.id!r}: the kept answers are not the tokens under its loss mask")

    def conclude(self) -> list[Check]:
        sentence = "Token ids and loss mask are those of the prompts and answers."
        if self._wrong.count:
            sentence = (
                f"{self._wrong}. Ids that do not belong to the rows (samples exchanged, another tokenizer or chat "
                "template), or a loss mask made for other lengths: extract again, and do not edit shards by hand."
            )
        elif not self._answer_rows:
            sentence = (
                "The loss mask is empty: no row belongs to an answer, so a drafter would learn nothing. Every answer "
                "is one token long, or the answers were not captured: raise max_new_tokens and extract again."
            )
        return [
            Check(
                name="token_ids",
                verdict="fail" if self._wrong.count or not self._answer_rows else "pass",
                value=f"{self._answer_rows} of {self._rows} rows under the loss mask, {self._wrong.count} faults",
                threshold="ids as hashed, below the vocabulary size; mask = answer rows, more than 0",
                sentence=sentence,
            )
        ]
