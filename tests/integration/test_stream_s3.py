"""A dump streamed from a real S3 server: ranges only, bounded memory, and right through every kind of fault."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from eagle3.digests import sha256_file
from eagle3.dump.cache import BlockCache
from eagle3.dump.files import write_manifest
from eagle3.dump.manifest import DumpError, Generation, Manifest, TargetIdentity, TokenizerIdentity
from eagle3.dump.reader import DumpReader, SampleReader
from eagle3.dump.stream import StreamReader
from eagle3.dump.writer import CapturedSample, DumpWriter
from infra.settings import Settings
from infra.store import StoreCorrupt, StoreError, open_store
from infra.store_source import StoreSource
from tests.dumps import SPEC, capture, engine_record, flip_bit, write_dump
from tests.integration.fault_proxy import FaultProxy, Kind, fault_proxy
from tests.integration.s3_server import S3Server, s3_server

pytestmark = pytest.mark.integration

URI = "s3://test-bucket/dumps/a"
MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        open_store("s3://test-bucket", running.settings()).ensure_bucket()
        yield running


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as running:
        yield running


@pytest.fixture
def settings(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> Settings:
    """Of a client behind the proxy."""
    return server.settings(home=tmp_path / "home", s3_endpoint=proxy.endpoint, s3_timeout=1, s3_retries=3)


@pytest.fixture(scope="module")
def dump(tiny_llama: Path, server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 samples in one shard, here and on the server."""
    folder = tmp_path_factory.mktemp("dump")
    write_dump(capture(tiny_llama), folder, shard_bytes=2**30)
    upload(folder, URI, server)
    return folder


def upload(folder: Path, uri: str, server: S3Server) -> None:
    store = open_store(uri, server.settings())
    for path in folder.iterdir():
        store.put_file(path.name, path, sha256=sha256_file(path))


def stream(uri: str, settings: Settings, tmp_path: Path, *, block_samples: int = 2) -> StreamReader:
    source = StoreSource(open_store(uri, settings))
    return StreamReader.open(source, BlockCache(tmp_path / "cache", 100 * MIB), block_samples=block_samples)


def assert_same(one: SampleReader, other: SampleReader) -> None:
    for index in range(len(other.records)):
        a, b = one.read(index), other.read(index)
        assert all(torch.equal(x, y) for x, y in zip(one.tokens(index), other.tokens(index), strict=True))
        assert torch.equal(a.loss_mask, b.loss_mask)
        assert all(torch.equal(state, b.states[point]) for point, state in a.states.items())


def test_a_stream_is_the_dump_and_asks_for_each_block_once(
    dump: Path, settings: Settings, proxy: FaultProxy, tmp_path: Path
) -> None:
    reader = stream(URI, settings, tmp_path)
    assert_same(reader, DumpReader.open(dump))
    shard = reader.manifest.shards[0].name
    tensors, blocks = 1 + len(SPEC.points), 4
    assert (
        proxy.count("GET", shard) == 1 + blocks * tensors + 1 + 1
    )  # header, blocks, token ids; the size, by a listing
    before = len(proxy.requests)
    assert_same(reader, DumpReader.open(dump))
    assert len(proxy.requests) == before


OF_RANGES: tuple[Kind, ...] = ("truncated", "broken", "wrong answer")
OF_REQUESTS: tuple[Kind, ...] = ("500", "503", "timeout", "reset", "lost")  # boto3 itself repeats these


@pytest.mark.parametrize(
    ("kind", "block_samples"),
    [
        *((kind, 2) for kind in OF_RANGES),
        ("wrong answer", 100),
        *(pytest.param(kind, blocks, marks=pytest.mark.slow) for kind in OF_REQUESTS for blocks in (2, 100)),
    ],
)
def test_a_stream_survives_a_fault(
    dump: Path, settings: Settings, proxy: FaultProxy, tmp_path: Path, kind: Kind, block_samples: int
) -> None:
    reader = stream(URI, settings, tmp_path, block_samples=block_samples)
    proxy.once(kind, method="GET", path=reader.manifest.shards[0].name)
    assert_same(reader, DumpReader.open(dump))
    assert proxy.spoiled == [kind]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_through_many_faults_is_right_or_names_the_object(
    dump: Path, settings: Settings, proxy: FaultProxy, tmp_path: Path, seed: int
) -> None:
    proxy.hang_s = 1.1
    proxy.at_random(seed, 0.3)
    for number in range(2):
        try:
            reader = stream(URI, settings, tmp_path / str(number), block_samples=3)
            assert_same(reader, DumpReader.open(dump))
        except (DumpError, StoreError) as error:
            assert URI in str(error)  # noqa: PT017
    assert len(proxy.spoiled) > 3


def test_a_flipped_bit_on_the_server_is_named_by_sample_and_object(
    dump: Path, server: S3Server, settings: Settings, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in dump.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    flip_bit(damaged / "shard-00000.safetensors")
    upload(damaged, "s3://test-bucket/dumps/damaged", server)
    reader = stream("s3://test-bucket/dumps/damaged", settings, tmp_path)
    bad = []
    for index, record in enumerate(reader.records):
        try:
            reader.read(index)
        except DumpError as error:
            bad.append(record.id)
            assert f"dumps/damaged/shard-00000.safetensors: sample {record.id!r}, rows" in str(error)  # noqa: PT017
    assert len(bad) == 1


def test_a_truncated_object_is_named(dump: Path, server: S3Server, settings: Settings, tmp_path: Path) -> None:
    store = open_store("s3://test-bucket/dumps/cut", server.settings())
    for path in dump.iterdir():
        data = path.read_bytes()
        store.put_bytes(path.name, data[:-500] if path.suffix == ".safetensors" else data)
    with pytest.raises(DumpError, match=r"dumps/cut/shard-00000.safetensors has \d+ bytes instead of \d+"):
        stream("s3://test-bucket/dumps/cut", settings, tmp_path).read(0)
    with pytest.raises(StoreCorrupt, match=r"dumps/cut/shard-00000.safetensors should have \d+ bytes from 0 on"):
        stream("s3://test-bucket/dumps/cut", settings, tmp_path, block_samples=100).read(0)


def large_dump(folder: Path, *, samples: int, rows: int, width: int, shard_bytes: int) -> Manifest:
    """Made-up states of some width, bfloat16."""
    identity = TargetIdentity(
        name="made-up",
        model_class="LlamaForCausalLM",
        num_layers=8,
        hidden_size=width,
        vocab_size=1000,
        config_sha256="0" * 64,
        weights_sha256="0" * 64,
    )
    writer = DumpWriter(folder, SPEC, hidden_size=width, shard_bytes=shard_bytes)
    generator = torch.Generator().manual_seed(0)
    for number in range(samples):
        states = {p: torch.randn(rows, width, generator=generator).bfloat16() for p in SPEC.points}
        ids = torch.randint(0, 1000, (rows,), generator=generator)
        writer.add(CapturedSample(f"p{number:05d}", ids, 1, rows // 2, rows - rows // 2 + 1, "stop", states))
    files = writer.finish()
    manifest = Manifest(
        created_at=datetime.now(UTC),
        spec=SPEC,
        spec_digest="0" * 64,
        content_digest=files.content_digest,
        dtype="bfloat16",
        target=identity,
        tokenizer=TokenizerIdentity(sha256="0" * 64),
        engine=engine_record(identity, SPEC),
        prompts_sha256="0" * 64,
        generation=Generation(source="while_answering", max_new_tokens=rows),
        num_samples=files.num_samples,
        num_tokens=files.num_tokens,
        shards=files.shards,
        samples=files.samples,
        packages={},
    )
    write_manifest(folder, manifest)
    return manifest


_READS_ALL = """
import json, sys
from pathlib import Path
import torch
from eagle3.dump.cache import BlockCache
from eagle3.dump.order import Order, OrderedSample
from eagle3.dump.prefetch import Prefetch
from eagle3.dump.stream import StreamReader
from infra.settings import Settings
from infra.store import open_store
from infra.store_source import StoreSource

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

torch.set_num_threads(1)
uri, folder, room, block = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
cache = BlockCache(folder, room)
reader = StreamReader.open(StoreSource(open_store(uri, Settings.load())), cache, block_samples=block)
entries = [OrderedSample(record.id, index // block) for index, record in enumerate(reader.records)]
order = Order(entries, seed=0, window_blocks=2).epoch(0)
Path("/proc/self/clear_refs").write_text("5")  # the peak of what follows, not of the imports
before, most, rows = status("VmRSS"), 0, 0
with Prefetch((reader.read(index) for index in order), 2) as samples:
    for sample in samples:
        rows += len(sample.input_ids)
        most = max(most, cache.used())
print(json.dumps({"grew": status("VmHWM") - before, "cache": most, "rows": rows}))
"""


@pytest.mark.slow
def test_a_dump_many_times_larger_than_cache_and_memory_is_read_once_in_bounded_memory(
    server: S3Server, proxy: FaultProxy, settings: Settings, tmp_path: Path
) -> None:
    """32 samples of 2 MiB; blocks of 2, a window of 2 blocks, room for 3; 2 samples ahead."""
    manifest = large_dump(tmp_path / "dump", samples=32, rows=256, width=1024, shard_bytes=9 * MIB)
    dump_bytes = sum(entry.bytes for entry in manifest.files)
    uri = "s3://test-bucket/dumps/large"
    upload(tmp_path / "dump", uri, server)
    room = 13 * MIB
    secret = settings.s3_secret_key
    assert secret is not None
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "EAGLE3_S3_ENDPOINT": proxy.endpoint,
        "EAGLE3_S3_ACCESS_KEY": server.access_key,
        "EAGLE3_S3_SECRET_KEY": secret.get_secret_value(),
    }
    arguments = [sys.executable, "-c", _READS_ALL, uri, str(tmp_path / "cache"), str(room), "2"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["rows"] == manifest.num_tokens
    assert told["cache"] <= room
    # A block being fetched (twice: as it comes, and joined), samples: one in use, two ahead, one in the making.
    assert told["grew"] < 2 * 4 * MIB + 4 * 2 * MIB + 12 * MIB < dump_bytes / 2
    fetched = proxy.count("GET", "shard-")
    assert fetched == 16 * (1 + len(SPEC.points)) + 2 * len(manifest.shards)  # each block once; header and size of each
