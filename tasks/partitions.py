"""An extraction in partitions: the prompts are split, each part is a flow run, one manifest is written over all.

Every part stores its shards at the dump's own prefix, under names that say which part (`shard-p000-00000.safetensors`),
and keeps a journal of its own. So a merge moves no tensor: it reads the journals, compares them, and writes the list of
samples and the manifest. A part that is whole by its journal is not started again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from eagle3.errors import Eagle3Error
from eagle3.prompts import TokenizedPrompt
from infra.settings import Settings
from tasks.extraction import Captured, Wanted, commit, owned
from tasks.inputs import bytes_per_token, partitioned
from tasks.journal import Claim, Journal, Served, ShardDone
from tasks.params import ExtractParams
from tasks.partition_runs import complete, run_page
from tasks.planning import announce_extraction
from tasks.progress import StageProgress
from tasks.resume import Extraction, begin, differences, partition_asked, server_differences


class MergeRefused(Eagle3Error):
    """Partitions that do not make one dump: one is not whole, or they were not captured alike."""


@dataclass(frozen=True)
class Part:
    """A partition of an extraction: what it was given, and what it has."""

    number: int
    prompts: tuple[TokenizedPrompt, ...]
    journal: Journal

    def missing(self) -> int:
        """How many of its prompts are not stored."""
        stored = {record.id for shard in self.journal.done()[0] for record in shard.records}
        return sum(prompt.id not in stored for prompt in self.prompts)


def parts_of(extraction: Extraction, prompts: Sequence[TokenizedPrompt], params: ExtractParams) -> list[Part]:
    """The partitions of an extraction, the same on every machine."""
    split = partitioned(prompts, params.partitions, params.answers.max_new_tokens)
    return [Part(number, part, Journal(extraction.store, number)) for number, part in enumerate(split)]


@task(name="capture in partitions", cache_policy=NO_CACHE)
def capture_partitioned(params: ExtractParams, settings: Settings) -> Captured:
    """Start a flow run for each partition that is not whole, wait for them, merge what they stored, commit the dump."""
    with StageProgress("extract", "prompts") as progress:
        wanted = Wanted.of(params, settings, progress)
        extraction = begin(params, wanted.asked, settings, progress.note)
        parts = parts_of(extraction, wanted.prompts, params)
        if extraction.committed:
            progress.note("the dump is committed already")
            return Captured.of(extraction, extraction.committed, described(parts))
        with owned(wanted, extraction, settings, progress) as job:
            missing = {part.number: part.missing() for part in parts}
            if any(missing.values()):
                per_token = bytes_per_token(params.capture, wanted.target.hidden_size, wanted.dtype)
                announce_extraction(params, wanted.prompts, per_token, settings, get_run_logger().info)
            complete(params, extraction, {part.number: len(part.prompts) for part in parts}, missing, progress)
            progress.note("the partitions are merged")
            manifest = commit(job, *merged(extraction, parts))
            return Captured.of(extraction, manifest, described(parts))


def merged(extraction: Extraction, parts: Sequence[Part]) -> tuple[Served, list[ShardDone]]:
    """What all partitions hold, as if one worker had captured it.

    MergeRefused names every reason: a partition that is not whole or holds what is not its own, a claim, an engine or a
    type of states that differs from the first one's. The probe is the first one's, or none where a server had none.
    """
    served: list[Served] = []
    shards: list[ShardDone] = []
    problems: list[str] = []
    for part in parts:
        title = f"partition {part.number} of {len(parts)}"
        claim, record = part.journal.last_claim(), part.journal.served()
        if claim is None or record is None:
            problems.append(f"{title} was never begun")
            continue
        done, remarks = part.journal.done()
        expected = extraction.claim.asked | partition_asked(part.number, part.prompts)
        found = differences(claim.asked, expected)
        found += _not_its_own(part, done)
        if served:
            found += [*server_differences(record, served[0]), *_otherwise(record, served[0])]
        if shards and done:
            found += differences({"states.dtype": done[0].dtype}, {"states.dtype": shards[0].dtype})
        problems += [f"{title}: {problem}" for problem in (*found, *remarks)]
        served.append(record)
        shards += done
    if problems:
        raise MergeRefused(
            f"the partitions at {extraction.uri} do not make one dump:\n- " + "\n- ".join(problems) + "\nNothing is "
            "written. Start the extraction again with the same parameters, and what is missing is captured; where "
            "they were captured differently, give every worker the same software and target and begin anew "
            "(resume: new)"
        )
    whole = served[0] if all(record.probe for record in served) else served[0].model_copy(update={"probe": None})
    return whole, shards


def described(parts: Sequence[Part]) -> list[str]:
    """A line on each partition: what it holds, and the flow runs that captured it."""
    lines = []
    for part in parts:
        done, _ = part.journal.done()
        samples, tokens = (sum(getattr(shard.shard, field) for shard in done) for field in ("samples", "tokens"))
        claims = part.journal.claims()
        line = f"{samples} samples, {tokens} tokens, {len(done)} shards, on {', '.join(_hosts(claims))}"
        pages = [run_page(claim.run) for claim in claims if claim.run]
        lines.append(f"{line}: {', '.join(pages)}" if pages else line)
    return lines


def _hosts(claims: Sequence[Claim]) -> list[str]:
    return list(dict.fromkeys(claim.host for claim in claims))


def _not_its_own(part: Part, done: Sequence[ShardDone]) -> list[str]:
    own = {prompt.id for prompt in part.prompts}
    stored = {record.id for shard in done for record in shard.records}
    problems = []
    if lost := sorted(own - stored):
        problems.append(f"{len(lost)} of its {len(own)} prompts are not stored ({', '.join(lost[:3])})")
    if foreign := sorted(stored - own):
        problems.append(f"{len(foreign)} samples are not of its prompts ({', '.join(foreign[:3])})")
    return problems


def _otherwise(there: Served, here: Served) -> list[str]:
    """How the answers came about, where that differs; the source is compared with the server already."""
    given: list[dict[str, Any]] = [
        {f"generation.{field}": value for field, value in served.generation.model_dump(exclude={"source"}).items()}
        for served in (there, here)
    ]
    return differences(*given)
