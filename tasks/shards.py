"""Map-style work: the shards of a dump are examined side by side, on threads of this process or on Ray."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from eagle3.dump.manifest import Manifest
from eagle3.errors import Eagle3Error
from infra.settings import Settings

if TYPE_CHECKING:
    from eagle3.dump.reader import DumpReader
    from eagle3.evidence.shards import ShardEvidence

MOST_WORKERS = 8
"""Where nobody names a number: hashing is bound by the disk before it keeps more cores busy."""


class ShardsNotExamined(Eagle3Error):
    """Shards of which nothing is known, because the work on them ended with an error."""


@task(name="examine shards", task_run_name="examine {name}", cache_policy=NO_CACHE)
def examine_part(folder: Path, manifest_sha256: str, start: int, end: int, name: str) -> "ShardEvidence":  # noqa: ARG001 - the run's name
    """Shards start ... end - 1 of a dump in a folder. Only paths and numbers go in: a worker reads the files itself."""
    import torch

    from eagle3.dump.reader import DumpReader
    from eagle3.evidence.shards import examine_shards

    torch.set_num_threads(1)  # shards are what runs side by side
    shards = range(start, end)
    return examine_shards(DumpReader.open_part(folder, shards, expect_sha256=manifest_sha256), shards)


@contextmanager
def examined_shards(reader: "DumpReader", settings: Settings) -> "Iterator[Iterator[ShardEvidence]]":
    """What the workers say of each part of a dump, in order, as `validate_dump` takes it; all are at work at once.

    The iterator raises ShardsNotExamined, which names the shards, where a worker ended with an error; RayUnavailable
    comes at the beginning. Inside a flow run.
    """
    import torch

    from eagle3.evidence.shards import parts_of

    threads, digest = torch.get_num_threads(), reader.manifest.digest()
    parts = parts_of(reader.manifest)
    names = [_name(reader.manifest, shards) for shards in parts]
    try:
        with _runner(settings) as runner:
            futures = [
                runner.submit(
                    examine_part,
                    {
                        "folder": reader.folder,
                        "manifest_sha256": digest,
                        "start": shards.start,
                        "end": shards.stop,
                        "name": name,
                    },
                )
                for shards, name in zip(parts, names, strict=True)
            ]
            yield (_result(future, name, settings) for future, name in zip(futures, names, strict=True))
    finally:
        torch.set_num_threads(threads)  # the workers' one would be that of new threads of this process too


@contextmanager
def _runner(settings: Settings) -> Iterator[TaskRunner[Any]]:
    workers = settings.map_workers or min(os.cpu_count() or 1, MOST_WORKERS)
    with ExitStack() as stack:
        if settings.map_runner == "threads":
            yield stack.enter_context(ThreadPoolTaskRunner(max_workers=workers))
            return
        from infra.ray_node import connected_ray

        stack.enter_context(connected_ray(settings, workers=workers))
        from prefect_ray import RayTaskRunner

        yield stack.enter_context(RayTaskRunner())


def _name(manifest: Manifest, shards: range) -> str:
    first, last = manifest.shards[shards.start].name, manifest.shards[shards.stop - 1].name
    return first if first == last else f"{first} to {last}"


def _result(future: Any, name: str, settings: Settings) -> "ShardEvidence":
    try:
        evidence: ShardEvidence = future.result()
    except Exception as error:
        seen = " Ray's workers must see EAGLE3_HOME at the same path." if settings.map_runner == "ray" else ""
        raise ShardsNotExamined(
            f"{name} could not be examined ({settings.map_runner}): {type(error).__name__}: {str(error).rstrip('.')}."
            f"{seen} This says nothing of the dump: mend the cause, and validate again"
        ) from error
    return evidence
