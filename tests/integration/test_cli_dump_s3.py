"""`eagle3 dump` on dumps in a real S3 server: only what is needed is fetched, and nothing is left behind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3.digests import sha256_file
from eagle3.dump.manifest import Manifest
from flows.cli import app
from infra.store import open_store
from tests.dumps import flip_bit, make_dump
from tests.integration.s3_server import S3Server, s3_server

pytestmark = pytest.mark.integration

URI = "s3://test-bucket/dumps/a"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3") as server:
        settings = server.settings(s3_retries=0, s3_timeout=5)
        monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("EAGLE3_STORE", settings.store)
        monkeypatch.setenv("EAGLE3_S3_ENDPOINT", str(settings.s3_endpoint))
        for name in ("s3_access_key", "s3_secret_key"):
            if secret := getattr(settings, name):
                monkeypatch.setenv(f"EAGLE3_{name.upper()}", secret.get_secret_value())
        yield server


@pytest.fixture
def manifest(tiny_llama: Path, tmp_path: Path, server: S3Server) -> Manifest:
    settings = server.settings()
    open_store(settings.store, settings).ensure_bucket()
    manifest = make_dump(tiny_llama, tmp_path / "dump")
    for path in (tmp_path / "dump").iterdir():
        open_store(URI, settings).put_file(path.name, path, sha256=sha256_file(path))
    return manifest


def test_a_stored_dump_is_looked_at_from_every_side(
    manifest: Manifest, tiny_llama: Path, tmp_path: Path, server: S3Server
) -> None:
    run = CliRunner().invoke
    assert run(app, ["dump", "verify", URI]).exit_code == 0
    described = run(app, ["dump", "inspect", URI, "--statistics", "--json"])
    assert (described.exit_code, json.loads(described.stdout)["num_tokens"]) == (0, manifest.num_tokens)
    for options in (["--target", str(tiny_llama)], []):
        attributed = run(app, ["dump", "attribute", URI, *options, "--json"])
        assert attributed.exit_code == 0, attributed.output
        assert json.loads(attributed.stdout)["reference"] == ("target" if options else "probe")
    compared = run(app, ["dump", "compare", URI, str(tmp_path / "dump"), "--json"])
    assert (compared.exit_code, json.loads(compared.stdout)["verdict"]) == (0, "pass")

    first = manifest.shards[0].name
    flip_bit(tmp_path / "dump" / first)
    settings = server.settings()
    open_store(URI, settings).put_file(first, tmp_path / "dump" / first, sha256=sha256_file(tmp_path / "dump" / first))
    damaged = run(app, ["dump", "attribute", URI, "--target", str(tiny_llama)])
    assert damaged.exit_code == 3
    assert f"{URI}/{first} should have sha256" in damaged.stderr
    assert list((tmp_path / "home" / "staging").iterdir()) == []

    server.kill()
    for command in ("verify", "inspect", "attribute"):
        assert run(app, ["dump", command, URI]).exit_code == 3
