"""What checking costs: uploads and downloads through our store, beside boto3 alone with its defaults, in one run.

    python benchmarks/store.py [--mib 512] [--repeats 5] [--ceph] [--own] [--json]

One file of random bytes, in turns through the store (hashed, its ETag compared; on the way down hashed and flushed to
the disk) and through boto3's `upload_file` and `download_file`; the ratio of the medians. The server is the local one
(ministack); with --ceph Ceph's RGW, with --own the one of EAGLE3_S3_ENDPOINT and EAGLE3_STORE.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import boto3

from eagle3.digests import sha256_file
from infra.settings import Settings
from infra.store import open_store
from tests.integration.rgw_server import rgw_server
from tests.integration.s3_server import s3_server

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ceph", action="store_true")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, serving(Path(name), options) as settings:
        figures = measure(Path(name), settings, options)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<34}{value}" for name, value in figures.items()))


@contextmanager
def serving(folder: Path, options: argparse.Namespace) -> Iterator[Settings]:
    """Settings of the server that is measured."""
    if options.own:
        yield Settings.load()
    elif options.ceph:
        with rgw_server(folder / "server") as rgw:
            yield rgw.settings()
    else:
        with s3_server(folder / "server") as local:
            yield local.settings()


def measure(folder: Path, settings: Settings, options: argparse.Namespace) -> dict[str, float]:
    where = urlsplit(settings.store)
    bucket, prefix = where.netloc, f"{where.path.strip('/')}/benchmark-{uuid.uuid4().hex}".strip("/")
    store = open_store(f"s3://{bucket}/{prefix}", settings)
    store.ensure_bucket()
    source, target = folder / "in", folder / "out"
    with source.open("wb") as file:
        for _ in range(options.mib):
            file.write(os.urandom(MIB))
    sha256, size = sha256_file(source), options.mib * MIB
    client = plain_client(settings)
    actions: dict[str, Callable[[], object]] = {
        "upload": lambda: store.put_file("ours", source, sha256=sha256),
        "upload_boto3": lambda: client.upload_file(str(source), bucket, f"{prefix}/boto3"),
        "download": lambda: store.get_file("ours", target, sha256=sha256, size=size),
        "download_boto3": lambda: client.download_file(bucket, f"{prefix}/boto3", str(target)),
    }
    rates: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(options.repeats + 1):
        for name, action in actions.items():
            start = time.monotonic()
            action()
            if turn:  # the first turn warms up
                rates[name].append(options.mib / (time.monotonic() - start))
            target.unlink(missing_ok=True)
    for key in ("ours", "boto3"):
        store.delete(key)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        **{f"{name}_mib_per_second": round(value, 1) for name, value in medians.items()},
        "upload_ratio": round(medians["upload"] / medians["upload_boto3"], 3),
        "download_ratio": round(medians["download"] / medians["download_boto3"], 3),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "mib": options.mib,
        "repeats": options.repeats,
    }


def plain_client(settings: Settings):
    """boto3 as everybody has it."""
    access, secret = settings.s3_access_key, settings.s3_secret_key
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.s3_endpoint,
        region_name=settings.s3_region,
        aws_access_key_id=access.get_secret_value() if access else None,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
    )


if __name__ == "__main__":
    main()
