"""The bulk of an extraction: prompts go out, rows come back, shards leave. Every buffer on the way has a bound.

    prompts -> at most `streams` requests -> staged rows -> the shard being packed -> at most 2 uploads -> the store

Staged rows stay until their shard is stored, verified and noted in the journal: what a killed process leaves on this
machine is taken up by the next one.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eagle3.dump.content import dtype_name
from eagle3.dump.writer import CapturedSample, DumpWriter, PackedShard
from eagle3.prompts import GivenAnswers, TokenizedPrompt
from infra.sglang.client import Generated, GenerateRequest, SglangError
from infra.sglang.staging import StagingError, staged_path
from tasks.answer_log import ANSWERS_NAME, AnswerLog
from tasks.capture_session import CaptureRefused, Session, Source
from tasks.estimate import most_staged
from tasks.journal import ShardDone
from tasks.progress import StageProgress
from tasks.pump import pump
from tasks.resume import Extraction
from tasks.uploads import Uploads

_CAPTURE, _ANSWER = "cap", "ans"  # kinds of requests
Answer = Generated | GivenAnswers


@dataclass(frozen=True)
class Bounds:
    """How much may lie on the staging disk, in bytes. Rows count twice: as they are staged, and in their shard."""

    row_bytes: int  # of one token: its states, its id and its mask
    staging_bytes: int

    @classmethod
    def of(
        cls, staging_bytes: int, *, shard_bytes: int, prompts: Sequence[TokenizedPrompt], most: int, row_bytes: int
    ) -> "Bounds":
        """What was asked, but never less than one shard and the longest sample need."""
        longest = max(len(prompt.input_ids) + prompt.most_answer_tokens(most) for prompt in prompts)
        return cls(row_bytes, most_staged(staging_bytes, shard_bytes=shard_bytes, longest=longest, row_bytes=row_bytes))


class CaptureRun:
    """Captures the prompts that the journal does not have yet; used once."""

    def __init__(
        self,
        session: Session,
        extraction: Extraction,
        prompts: Sequence[TokenizedPrompt],
        source: Source,
        folder: Path,
        progress: StageProgress,
        bounds: Bounds,
    ) -> None:
        self._session, self._extraction, self._prompts, self._source = session, extraction, prompts, source
        self._progress, self._bounds = progress, bounds
        self._streams = session.params.serving.streams
        self._most = session.params.answers.max_new_tokens
        self._log = AnswerLog(folder / ANSWERS_NAME)
        self._answers: dict[str, Generated] = {}  # of an earlier process, by prompt
        self._uploads = Uploads()
        self._reserved: dict[int, int] = {}  # bytes that a request in flight may stage
        self._packing: list[int] = []  # prompts whose rows are in the shard that is being packed
        self._packing_bytes = 0
        self._dtype: str | None = extraction.done[0].dtype if extraction.done else None
        self._new: list[ShardDone] = []
        _remove_files(folder / "shards")  # half-stored ones of an earlier process: their rows are still staged
        self._writer = DumpWriter(
            folder / "shards",
            session.params.capture,
            hidden_size=session.target.hidden_size,
            shard_bytes=session.params.shard_mib * 2**20,
            stem=extraction.claim.stem,
            dtype=self._dtype,
            on_shard=self._send_off,
        )

    def run(self) -> list[ShardDone]:
        """Every shard of the dump, stored and noted: those of earlier owners, then those of this one."""
        done, total = self._extraction.done_ids, len(self._prompts)
        wanted = [number for number, prompt in enumerate(self._prompts) if prompt.id not in done]
        self._progress.begin("answering and capturing", total=total)
        self._remove_stale(set(wanted))
        with self._uploads:
            try:
                rest = [number for number in wanted if not self._take_staged(number)]
                again = total - len(rest)
                self._progress.at(again)
                self._progress.begin(
                    f"resumed: {again} of {total} prompts are done" if again else "answering and capturing"
                )
                pump(rest, self._ask, self._take, streams=self._streams, gate=self, give_up=self._abort)
                self._progress.note("the last shards are stored")
                self._writer.flush()
                self._uploads.finish()
            finally:
                self._log.close()
        return [*self._extraction.done, *self._new]

    # Back-pressure: what `pump` asks before it sends.

    def may_start(self, number: int) -> bool:
        rows = sum(self._reserved.values()) + self._packing_bytes + self._bound(number)
        return 2 * rows + self._uploads.num_bytes <= self._bounds.staging_bytes

    def started(self, number: int) -> None:
        self._reserved[number] = self._bound(number)

    def wait_for_room(self) -> bool:
        if not self._uploads.num_bytes:
            return False
        self._uploads.wait_for_one()
        return True

    def _bound(self, number: int) -> int:
        """The most bytes that the rows of a prompt take."""
        prompt = self._prompts[number]
        return (len(prompt.input_ids) + prompt.most_answer_tokens(self._most)) * self._bounds.row_bytes

    # In the threads of `pump`.

    def _ask(self, number: int) -> Answer:
        """The answer to a prompt, whose rows are staged when it is there."""
        prompt = self._prompts[number]
        if self._source == "while_answering":
            heard = self._send(_CAPTURE, number, prompt.input_ids, self._most, tap=True)
            self._log.keep(prompt.id, heard)
            return heard
        answer = self._known(prompt)
        if answer is None:
            heard = self._send(_ANSWER, number, prompt.input_ids, self._most, tap=False)
            self._log.keep(prompt.id, heard)
            answer = heard
        # Read once more, answer included: the rows are prefill's, which decode graphs do not hide.
        self._send(_CAPTURE, number, (*prompt.input_ids, *answer.output_ids[:-1]), 1, tap=True)
        return answer

    def _send(self, kind: str, number: int, ids: Sequence[int], most: int, *, tap: bool) -> Generated:
        rid = self._session.rid(kind, number)
        request = GenerateRequest(rid=rid, input_ids=tuple(ids), max_new_tokens=most, tap=tap)
        return self._session.client.answer(request)

    def _known(self, prompt: TokenizedPrompt) -> Answer | None:
        """What follows the prompt, where it was given, or an earlier process heard it."""
        return prompt.given or self._answers.get(prompt.id)

    # In the calling thread, one after another.

    def _take(self, number: int, answer: Answer) -> None:
        self._pack(number, self._session.sample(self._prompts[number], self._session.rid(_CAPTURE, number), answer))
        del self._reserved[number]
        self._progress.advance()

    def _take_staged(self, number: int) -> bool:
        """Pack rows that an earlier process staged, if they are whole and their answer is known."""
        prompt, path = self._prompts[number], self._staged(number)
        answer = self._known(prompt)
        if answer is None or not path.exists():
            return False
        try:
            sample = self._session.sample(prompt, self._session.rid(_CAPTURE, number), answer)
        except (StagingError, CaptureRefused):
            path.unlink(missing_ok=True)
            return False
        self._pack(number, sample)
        return True

    def _pack(self, number: int, sample: CapturedSample) -> None:
        self._dtype = dtype_name(sample.states[self._session.params.capture.final].dtype)
        self._writer.add(sample)  # it may first write the shard that is full, of the prompts before this one
        self._packing.append(number)
        self._packing_bytes += len(sample.input_ids) * self._bounds.row_bytes

    def _send_off(self, path: Path, shard: PackedShard) -> None:
        numbers, rows = self._packing, self._packing_bytes
        self._packing, self._packing_bytes = [], 0
        self._uploads.submit(lambda: self._store(path, shard, numbers), rows + shard.entry.bytes)

    # In the thread of `Uploads`.

    def _store(self, path: Path, shard: PackedShard, numbers: Sequence[int]) -> None:
        """Store a shard, note it, and free what it took on this disk: in this order."""
        extraction, entry = self._extraction, shard.entry
        extraction.journal.check_still_mine(extraction.claim)
        files = [entry, *([entry.answers] if entry.answers else [])]
        for file in files:
            extraction.store.put_file(file.name, path.with_name(file.name), sha256=file.sha256)
        done = ShardDone.model_validate(
            {"number": extraction.claim.number, "dtype": self._dtype, "shard": entry, "records": shard.records}
        )
        extraction.journal.note_done(done)
        self._new.append(done)
        for file in files:
            path.with_name(file.name).unlink()
        for number in numbers:
            self._staged(number).unlink(missing_ok=True)

    def _staged(self, number: int) -> Path:
        return staged_path(self._session.staging, self._session.rid(_CAPTURE, number))

    def _remove_stale(self, wanted: set[int]) -> None:
        """What this extraction left staged and nobody needs: rows of stored prompts, and half-written ones."""
        of_ours = re.compile(rf"{_CAPTURE}-{re.escape(self._session.name)}-(\d{{6,}})\.safetensors(\..+\.tmp)?")
        for path in self._session.staging.iterdir():
            found = of_ours.fullmatch(path.name)
            if found and (found[2] or int(found[1]) not in wanted):
                path.unlink(missing_ok=True)
        self._answers = self._log.read({self._prompts[number].id for number in wanted})

    def _abort(self, numbers: list[int]) -> None:
        with suppress(SglangError):  # the server is gone, and its requests with it
            for number in numbers:
                for kind in (_ANSWER, _CAPTURE):
                    self._session.client.abort(self._session.rid(kind, number))


def _remove_files(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
