"""A real S3 server, Ceph's RGW, on loopback: one monitor, one OSD, one gateway, their data in a folder of the test.

    python -m tests.integration.rgw_server    says what is missing to start it

Nothing is installed here. Debian has it as: apt-get install ceph-mon ceph-osd radosgw ceph-common
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.ports import LOOPBACK, free_ports
from infra.settings import Settings

PACKAGES = {
    "ceph-mon": "ceph-mon",
    "monmaptool": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "radosgw": "radosgw",
    "radosgw-admin": "radosgw",
    "ceph": "ceph-common",
}
_START_TIMEOUT_S = 90.0
_CONFIG = """
[global]
fsid = {fsid}
mon initial members = a
mon host = v2:{host}:{mon_port}
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 2000
mon data avail crit = 1
mon data avail warn = 2
run dir = {folder}/run
admin socket = {socket}/$name.asok
log file = {folder}/log/$name.log
public addr = {host}
cluster addr = {host}
rgw dns name = {host}
[mon]
mon data = {folder}/mon
[osd]
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = 8589934592
bluestore block create = true
osd memory target = 1073741824
[client.rgw.a]
rgw frontends = beast endpoint={host}:{port}
rgw run sync thread = false
ms mon client mode = crc
"""


def missing_programs() -> list[str]:
    """The programs that are not installed."""
    return [name for name in PACKAGES if shutil.which(name) is None]


def what_is_missing() -> str:
    """A sentence for a person; "" where all is there."""
    missing = missing_programs()
    if not missing:
        return ""
    packages = sorted({PACKAGES[name] for name in missing})
    return (
        f"Ceph's RGW cannot be started: {', '.join(missing)} not found. On Debian: "
        f"apt-get install --no-install-recommends {' '.join(packages)}"
    )


class RgwServer:
    """A running gateway: `endpoint`, and the keys of two users, of whom only the first owns buckets."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self._folder, self._config = folder, folder / "ceph.conf"
        self.port, self._mon_port = free_ports(2, Settings().ports)
        self.endpoint = f"http://{LOOPBACK}:{self.port}"
        self.owner = _key_pair()
        self.stranger = _key_pair()
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("mon", "osd", "run", "log"):
            (folder / name).mkdir(parents=True)
        self._fsid = str(uuid.uuid4())
        self._config.write_text(
            _CONFIG.format(
                fsid=self._fsid, host=LOOPBACK, mon_port=self._mon_port, port=self.port, folder=folder, socket=socket
            )
        )

    def settings(self, **changes: Any) -> Settings:
        """Settings of the owner; a test's buckets start with `s3://test-`."""
        access, secret = self.owner
        values = {
            "home": self._folder / "home",
            "s3_endpoint": self.endpoint,
            "s3_access_key": access,
            "s3_secret_key": secret,
            "store": "s3://test-bucket",
        }
        return Settings.model_validate(values | changes)

    def start(self) -> None:
        """Make the cluster and wait until the gateway answers."""
        mon_map = str(self._folder / "monmap")
        address = f"[v2:{LOOPBACK}:{self._mon_port}]"
        self._run("monmaptool", "--create", "--clobber", "--fsid", self._fsid, "--addv", "a", address, mon_map)
        self._run("ceph-mon", *self._with_config, "--mkfs", "-i", "a", "--monmap", mon_map)
        self._serve("ceph-mon", "-i", "a")
        self._run("ceph", *self._with_config, "--connect-timeout", "30", "osd", "create")
        self._run("ceph-osd", *self._with_config, "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()))
        self._run("ceph", *self._with_config, "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self._serve("ceph-osd", "-i", "0")
        self._wait("the OSD", lambda: "1 up" in self._run("ceph", *self._with_config, "osd", "stat"))
        self._serve("radosgw", "-n", "client.rgw.a")
        self._wait("the gateway", self._answers)
        for name, (access, secret) in {"owner": self.owner, "stranger": self.stranger}.items():
            keys = ("--access-key", access, "--secret", secret)
            user = ("user", "create", "--uid", name, "--display-name", name, *keys)
            self._run("radosgw-admin", *self._with_config, "-n", "client.rgw.a", *user)

    def stop(self) -> None:
        """End what was started, last first."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    @property
    def _with_config(self) -> tuple[str, str]:
        return "-c", str(self._config)

    def _serve(self, program: str, *options: str) -> None:
        with (self._folder / "log" / f"{program}.out").open("ab") as output:
            command = [program, "-f", *self._with_config, *options]
            self._processes.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            )

    def _run(self, program: str, *options: str) -> str:
        done = subprocess.run([program, *options], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(options)} failed:\n{done.stderr[-2000:]}{self._logs()}")
        return done.stdout

    def _wait(self, what: str, is_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not is_up():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"{what} did not start:\n{self._logs()}")
            time.sleep(0.3)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted((self._folder / "log").iterdir()))


def _key_pair() -> tuple[str, str]:
    return f"TEST{uuid.uuid4().hex[:16].upper()}", uuid.uuid4().hex


@contextmanager
def rgw_server(folder: Path) -> Iterator[RgwServer]:
    """Serve S3 from `folder`; every process ended on the way out."""
    with tempfile.TemporaryDirectory(prefix="rgw-") as sockets:  # a socket's path has a length limit
        server = RgwServer(folder, Path(sockets))
        try:
            server.start()
            yield server
        finally:
            server.stop()


if __name__ == "__main__":
    if found := what_is_missing():
        sys.exit(found)
    if os.geteuid() != 0 and not os.access("/var/lib/ceph", os.R_OK):
        print("note: some builds of Ceph want to run as root or as the user ceph")
