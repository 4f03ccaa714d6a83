"""Map-style work on Prefect's threads and on a local Ray: one report, whoever did the work; nothing of Ray stays."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow
from prefect.testing.utilities import prefect_test_harness

from eagle3.dump.reader import DumpReader
from eagle3.evidence.report import EvidenceReport
from eagle3.evidence.validate import validate_dump
from infra.settings import Settings
from tasks.shards import ShardsNotExamined, examined_shards
from tests.dumps import Capture, capture, flip_bit, write_dump

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

WORKERS = 2


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture
def damaged(captured: Capture, tmp_path: Path) -> DumpReader:
    """A dump with one damaged shard of several."""
    manifest = write_dump(captured, tmp_path / "dump")
    flip_bit(tmp_path / "dump" / manifest.shards[2].name, at=0.99)
    return DumpReader.open(tmp_path / "dump")


@flow(name="examine-in-parts")
def examined_by(runner: str, folder: Path) -> Any:
    """What the workers say, and the processes that were started for it. Ray's workers are sent this flow: what it names
    is imported there, so that it names little."""
    before = set(psutil.Process().children(recursive=True))
    with examined_shards(DumpReader.open(folder), Settings(map_runner=runner, map_workers=WORKERS)) as examined:
        evidence = list(examined)
        started = set(psutil.Process().children(recursive=True)) - before
        listening = not_loopback([psutil.Process(), *started])
    return evidence, started, listening


def not_loopback(processes: Iterable[psutil.Process]) -> set[str]:
    """Addresses that are not this machine's own, on which one of them listens."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return {ip for ip in found if not ip.removeprefix("::ffff:").startswith("127.") and ip != "::1"}


def content(report: EvidenceReport) -> dict[str, object]:
    return report.model_dump(exclude={"created_at"})


def ray_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("e3ray-*"))


def ray_environment() -> dict[str, str]:
    """What a local Ray is given for as long as it runs: the token among it."""
    return {name: value for name, value in os.environ.items() if name.startswith(("RAY_AUTH", "RAY_ENABLE"))}


@pytest.mark.usefixtures("prefect_server")
def test_one_report_whoever_did_the_work_and_nothing_of_ray_stays(captured: Capture, damaged: DumpReader) -> None:
    environment, folders = ray_environment(), ray_folders()
    alone = validate_dump(damaged, captured.parts)
    assert damaged.manifest.shards[2].name in next(c for c in alone.failed() if c.name == "integrity").sentence
    evidence, started, listening = examined_by("threads", damaged.folder)
    assert content(validate_dump(damaged, captured.parts, examined=evidence)) == content(alone)
    assert (started, listening) == (set(), set())
    evidence, started, listening = examined_by("ray", damaged.folder)
    assert content(validate_dump(damaged, captured.parts, examined=evidence)) == content(alone)
    assert len(started) > WORKERS
    assert listening == set()
    assert psutil.wait_procs(started, timeout=30)[1] == []
    assert ray_folders() <= folders
    assert ray_environment() == environment
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.usefixtures("prefect_server")
def test_a_worker_that_fails_names_its_shard(damaged: DumpReader) -> None:
    @flow(name="part-without-a-dump")
    def examine() -> None:
        with examined_shards(damaged, Settings(map_workers=WORKERS)) as examined:
            list(examined)

    (damaged.folder / damaged.manifest.samples.name).unlink()  # after it was opened
    with pytest.raises(ShardsNotExamined, match=r"shard-00000\.safetensors could not be examined.*samples\.jsonl"):
        examine()
