"""What a second worker brings: the same extraction by one worker, and in two partitions by two, in one run.

    python benchmarks/workers.py [--seconds 120] [--streams 4] [--latency 1.0] [--home DIR] [--json]

SGLang is a STAND-IN here (tests/tap_stand_in.py): it answers each request after `--latency` seconds, whatever else it
has to do, and its states are made up; so it is not the limit. Everything else is the real thing: Prefect's server and
two workers of the pool (`EAGLE3_GPU_WORKERS=2 eagle3 up`), the local S3 server, MLflow, the deployed flows, the tap's
files, shards, journals and the merge. Both dumps must hold the same samples.

`ratio` compares the pace while prompts go out (from the first request to the last answer), `ratio_of_whole_runs` all of
the run, from its submission to the recorded dump: starts of processes too, which a long extraction does not notice.
"""

import argparse
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.dump.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from eagle3.target import Target
from infra import stack
from infra.settings import Settings
from infra.store import open_store
from tests.e2e.stack import write_prompts
from tests.tap_stand_in import VERSION, StandIn, stand_in
from tests.targets import make_llama

SPEC = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="what one worker's requests take, about")
    parser.add_argument("--streams", type=int, default=4, help="requests of one worker at once")
    parser.add_argument("--latency", type=float, default=1.0, help="seconds for each answer")
    parser.add_argument("--home", type=Path, help="EAGLE3_HOME of a stack that is up with two GPU workers; unset: own")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running_stack(options.home or Path(name) / "home") as settings:
        figures = measure(Path(name), settings, options)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<24}{value}" for name, value in figures.items()))


@contextmanager
def running_stack(home: Path) -> Iterator[Settings]:
    """A stack with two GPU workers; taken down at the end if it was not up before."""
    settings = Settings(home=home, gpu_workers=2)
    started = stack.up(settings, on_progress=lambda _: None)
    try:
        yield stack.connect(settings)
    finally:
        if not started.found:
            stack.down(settings)


class Watch:
    """When a stand-in was asked, by request."""

    def __init__(self, server: StandIn) -> None:
        self._lock, self.times = threading.Lock(), {}
        server.before = self.note

    def note(self, rid: str) -> None:
        with self._lock:
            self.times[rid] = time.monotonic()

    def pace(self, num_prompts: int, latency: float) -> float:
        """Prompts a second since the last call; the check of the live model and the probe are no prompts."""
        with self._lock:
            asked = [when for rid, when in self.times.items() if rid.startswith("cap-")]
            self.times.clear()
        if len(asked) != num_prompts:
            raise SystemExit(f"{num_prompts} prompts were to be captured, {len(asked)} were asked")
        return num_prompts / (max(asked) + latency - min(asked))


def measure(folder: Path, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    num_prompts = math.ceil(options.seconds * options.streams / options.latency)
    target = Target.open(make_llama(folder / "tiny-llama"))
    ids = ids_of(
        SPEC.aux, engine="sglang", version=VERSION, model_class=target.model_class, num_layers=target.num_layers
    )
    prompts, staging = write_prompts(folder / "prompts.jsonl", num_prompts + 1), folder / "tap"
    staging.mkdir()
    with stand_in(staging, target.hidden_size) as (server, url):
        server.present(target, ids)
        server.seconds = options.latency
        watch = Watch(server)
        params = {
            "target": {"path": str(target.path)},
            "prompts": {"file": str(prompts), "num_heldout": 1},
            "capture": SPEC.model_dump(mode="json"),
            "answers": {"max_new_tokens": 24},
            "serving": {"streams": options.streams, "attach": url, "attach_staging": str(staging), "device": "cpu"},
            "shard_mib": 1,
        }
        one, one_whole = extract("extract/blackwell", params | {"name": "one"}, settings)
        one_pace = watch.pace(num_prompts, options.latency)
        two, two_whole = extract("extract/cpu", params | {"name": "two", "partitions": 2}, settings)
        two_pace = watch.pace(num_prompts, options.latency)
    if (one.content_digest, one.num_samples) != (two.content_digest, two.num_samples):
        raise SystemExit("the merged dump does not hold what the single worker's does")
    return {
        "one_worker_per_second": round(one_pace, 2),
        "two_workers_per_second": round(two_pace, 2),
        "ratio": round(two_pace / one_pace, 2),
        "one_worker_seconds": round(one_whole, 1),
        "two_workers_seconds": round(two_whole, 1),
        "ratio_of_whole_runs": round(one_whole / two_whole, 2),
        "same_content": True,
        "prompts": num_prompts,
        "latency_seconds": options.latency,
        "streams": options.streams,
        "server": "stand-in of fixed latency",
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def extract(deployment: str, params: dict[str, Any], settings: Settings) -> tuple[Manifest, float]:
    """Run it on the pool's workers; its manifest, and seconds from submission to the end."""
    from prefect.deployments import run_deployment

    from tasks.handoff import take_result
    from tasks.results import ExtractResult

    start = time.monotonic()
    run = run_deployment(deployment, parameters={"params": params}, timeout=None, poll_interval=0.5)
    seconds = time.monotonic() - start
    if run.state is None or not run.state.is_completed():
        raise SystemExit(f"{deployment} ended as {run.state}")
    dump = take_result(str(run.id), ExtractResult, settings).dump
    store = open_store(dump.uri, settings)
    data = store.get_bytes(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
    return Manifest.parse(data, where=dump.uri), seconds


if __name__ == "__main__":
    main()
