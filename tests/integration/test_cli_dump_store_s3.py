"""`eagle3 dump ls|copy|prune` against a real S3 server: two buckets, leftovers by the server's own clock, a quota."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest

from eagle3.dump.manifest import Manifest
from infra.store import open_store
from tasks import housekeeping
from tasks.estimate import size
from tasks.room import store_rooms
from tests.command import dump
from tests.dumps import capture, write_dump
from tests.integration.s3_server import S3Server, s3_server

pytestmark = pytest.mark.integration

URI = "s3://test-bucket/dumps/a/1"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "dumps.md"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3") as server:
        settings = server.settings(s3_retries=0, s3_timeout=5)
        monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("EAGLE3_STORE", settings.store)
        monkeypatch.setenv("EAGLE3_S3_ENDPOINT", str(settings.s3_endpoint))
        monkeypatch.setenv("EAGLE3_S3_RETRIES", "0")
        for name in ("s3_access_key", "s3_secret_key"):
            if secret := getattr(settings, name):
                monkeypatch.setenv(f"EAGLE3_{name.upper()}", secret.get_secret_value())
        for bucket in ("test-bucket", "test-archive"):
            open_store(f"s3://{bucket}", settings).ensure_bucket()
        yield server


@pytest.mark.slow  # on a folder: tests/unit/test_cli_dump_store.py
def test_a_dump_goes_from_disk_to_s3_to_another_bucket_and_away(
    tiny_llama: Path, tmp_path: Path, server: S3Server
) -> None:
    captured = capture(tiny_llama, num_samples=4, max_new_tokens=16)
    old = datetime.now(UTC) - timedelta(days=40)
    manifest: Manifest = write_dump(captured, tmp_path / "dump", created_at=old)
    assert dump("copy", tmp_path / "dump", URI, "--json").json == {"uri": URI, "sha256": manifest.digest()}
    assert dump("copy", URI, "s3://test-archive/kept").code == 0
    assert dump("verify", "s3://test-archive/kept").code == 0

    settings = server.settings()
    store = open_store(settings.store, settings)
    store.put_bytes("dumps/a/2/extraction/claim-000000.json", b"{}")
    store.put_bytes("dumps/a/2/shard-00000.safetensors", b"12345")
    store.put_bytes("drafters/a/model.safetensors", b"a drafter")
    listed = {entry["uri"]: entry for entry in dump("ls", "--json").json["dumps"]}
    assert {uri: entry["state"] for uri, entry in listed.items()} == {
        URI: "committed",
        "s3://test-bucket/dumps/a/2": "uncommitted",
    }
    written = datetime.fromisoformat(listed["s3://test-bucket/dumps/a/2"]["written"])
    assert abs(datetime.now(UTC) - written) < timedelta(minutes=1)

    used = sum(num_bytes for _, num_bytes in store.list())
    (room,) = store_rooms(settings.model_copy(update={"store_quota": used + 100}), 101)
    assert (room.free, room.verdict) == (100, "lacking")
    assert f"1 bytes lack ({size(used)} of" in room.sentence()

    young = dump("prune", "--uncommitted", "--yes", "--force", "--json").json
    assert young["removed"] == []  # it was written today: an extraction may be at work
    for options in (["--older-than", "30d"], ["--uncommitted", "--older-than", "0h"]):
        assert dump("prune", *options, "--yes", "--force").code == 0
    assert [key for key, _ in store.list()] == ["drafters/a/model.safetensors"]
    assert housekeeping.find_dumps("s3://test-archive", settings)[0].sha256 == manifest.digest()
    assert list((tmp_path / "home" / "staging").iterdir()) == []


def test_the_rules_of_the_documentation_are_accepted_and_the_store_goes_on_working(server: S3Server) -> None:
    written = dict(re.findall(r"<!-- (\w+) -->\n```json\n(.*?)```", DOCS.read_text(), re.DOTALL))
    rules = {name: json.loads(text) for name, text in written.items()}
    assert set(rules) == {"lifecycle", "encryption", "policy"}
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )
    bucket = {"Bucket": "test-bucket"}
    client.put_bucket_lifecycle_configuration(**bucket, LifecycleConfiguration=rules["lifecycle"])
    client.put_bucket_encryption(**bucket, ServerSideEncryptionConfiguration=rules["encryption"])
    policy = json.dumps(rules["policy"]).replace("arn:aws:s3:::eagle3", "arn:aws:s3:::test-bucket")
    client.put_bucket_policy(**bucket, Policy=policy)
    kept = client.get_bucket_lifecycle_configuration(**bucket)["Rules"]
    assert {rule["ID"] for rule in kept} == {rule["ID"] for rule in rules["lifecycle"]["Rules"]}
    assert not any(
        "dumps/".startswith(rule["Filter"]["Prefix"]) and "Days" in rule.get("Expiration", {}) for rule in kept
    )
    store = open_store("s3://test-bucket", server.settings())
    store.put_bytes("dumps/a/1/manifest.json", b"{}", if_absent=True)
    assert store.get_bytes("dumps/a/1/manifest.json", max_bytes=2) == b"{}"
