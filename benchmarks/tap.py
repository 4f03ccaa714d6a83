"""What the tap costs: throughput with capture to disk, unasked, and without the tap; and the rows of a large target.

    python benchmarks/tap.py [--quick] [--only served|rows] [--repeats 3] [--folder DIR] [--json]

Served: two real servers with the same settings, one in capture mode with the tap, one with neither. The same prompts go
to the one without, unasked to the other, and to it with every request captured to disk, in turns whose order changes;
a figure is the median of the turns' ratios. SmolLM2-135M; --quick takes a tiny random target.

Rows: made-up states of width 7168, three captured layers and the final one, bfloat16. They go through the shard writer,
and through the tap, whose scheduler is a stand-in: a loop that calls the tap's hooks as SGLang does, and sleeps where a
GPU would compute. Beside them the disk's own rate: plain files of the same size, written and flushed. Both in the same
turn as fast as they go; then the stand-in makes rows at a set pace, and what it spends in the hooks is what the
scheduler is blocked.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

import infra.sglang.tap as tap_module
from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.dump.writer import CapturedSample, DumpWriter
from eagle3.prompts import load_prompts, tokenize
from eagle3.target import Target
from infra.quiet import quiet_libraries
from infra.settings import Settings
from infra.sglang.client import GenerateRequest, SglangClient
from infra.sglang.installed import sglang_version
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import SglangServer, start_server
from infra.sglang.staging import read_staged, staged_path
from infra.smollm2 import ensure_smollm2
from tests.targets import make_llama

PROMPTS = Path(__file__).resolve().parents[1] / "examples" / "word_problems.jsonl"
WIDTH, ROWS = 7168, 2048  # of a state; of a request, half of them a forward pass
SLOTS = ("layers.2", "layers.30", "layers.58", "norm")
WAYS = ("plain", "unasked", "captured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny target, fewer bytes")
    parser.add_argument("--only", choices=("served", "rows"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--mib", type=int, default=1024, help="rows a turn")
    parser.add_argument("--pace", type=float, default=0.5, help="GB/s; less where the disk is slower")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: the temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.mib = min(options.repeats, 2), min(options.mib, 512)
    quiet_libraries()
    figures: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.only != "rows":
            figures |= measure_served(Path(name), options)
        if options.only != "served":
            figures |= measure_rows(Path(name), options)
    figures |= {"load_after": os.getloadavg()[0], "repeats": options.repeats}
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<40}{value}" for name, value in figures.items()))


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# Served


def measure_served(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    settings = Settings()
    tell("the target is made ready")
    path = make_llama(folder / "target") if options.quick else ensure_smollm2(settings.root, tell)
    target = Target.open(path, cache_dir=folder / "cache")
    prompts = [
        prompt.input_ids
        for prompt in tokenize(
            load_prompts(PROMPTS).prompts[: options.prompts],
            target.tokenizer(),
            context_length=target.context_length,
            max_new_tokens=options.new_tokens,
        )
    ]
    tokens: dict[str, list[float]] = {way: [] for way in WAYS}  # a second
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}  # seconds of the server's processes
    with serving(folder, target, settings, options) as (servers, staging):
        for turn in range(options.repeats + 1):
            for way in WAYS if turn % 2 else reversed(WAYS):
                server = servers["plain" if way == "plain" else "capturing"]
                before, start = cpu_seconds(server), time.monotonic()
                number = answer(server.client, prompts, f"{way[0]}{turn:03d}", way == "captured", options)
                if turn:  # the first turn warms up
                    tokens[way].append(number / (time.monotonic() - start))
                    cpu[way].append(cpu_seconds(server) - before)
                    tell(f"turn {turn} of {options.repeats}, {way}: {tokens[way][-1]:.0f} tokens/s")
                staged = list(staging.glob("*.safetensors"))
                if len(staged) != (len(prompts) if way == "captured" else 0):
                    raise SystemExit(f"{way}: {len(staged)} files for {len(prompts)} requests")
                for file in staged:
                    file.unlink()
    return {
        "target": path.name,
        **{f"tokens_per_second_{way}": round(statistics.median(tokens[way]), 1) for way in WAYS},
        "captured_to_plain": ratio(tokens["captured"], tokens["plain"]),
        "unasked_to_plain": ratio(tokens["unasked"], tokens["plain"]),
        "cpu_seconds_plain_to_captured": ratio(cpu["plain"], cpu["captured"]),
        "cpu_seconds_plain_to_unasked": ratio(cpu["plain"], cpu["unasked"]),
    }


@contextmanager
def serving(
    folder: Path, target: Target, settings: Settings, options: argparse.Namespace
) -> Iterator[tuple[dict[str, SglangServer], Path]]:
    """Both servers, and where the tap of one of them writes."""
    layers = target.num_layers
    ids = ids_of(
        tuple(CapturePoint(f"layers.{layer}") for layer in (2, layers // 2, layers - 3)),
        engine="sglang",
        version=sglang_version(settings),
        model_class=target.model_class,
        num_layers=layers,
    )
    plain = ServerConfig(
        target=target.path,
        dtype="float32",
        threads=options.threads,
        max_running_requests=options.streams,
        extra_args=("--disable-radix-cache",),
    )
    staging = folder / "tap"
    capturing = plain.model_copy(update={"capture": CaptureServing(ids=ids, staging=staging), "extra_args": ()})
    tell("two servers start")
    with (
        start_server(plain, settings=settings, log_path=folder / "plain.log") as first,
        start_server(capturing, settings=settings, log_path=folder / "capturing.log") as second,
    ):
        yield {"plain": first, "capturing": second}, staging


def answer(
    client: SglangClient, prompts: list[tuple[int, ...]], name: str, asked: bool, options: argparse.Namespace
) -> int:
    """Answer every prompt; how many tokens were read and written."""
    requests = [
        GenerateRequest(
            rid=f"{name}-{number:05d}",
            input_ids=ids,
            max_new_tokens=options.new_tokens,
            ignore_eos=True,
            tap=asked,
        )
        for number, ids in enumerate(prompts)
    ]
    answers = client.generate_many(requests, streams=options.streams)
    return sum(found.prompt_tokens + len(found.output_ids) for found in answers)


def cpu_seconds(server: SglangServer) -> float:
    """User and system time of the server's processes so far."""
    guard = psutil.Process(server.pid)
    times = [process.cpu_times() for process in (guard, *guard.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def ratio(over: list[float], under: list[float]) -> float:
    """Median of the turns' ratios."""
    return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 3)


# Rows


def measure_rows(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = MadeUpRows()
    number = max(2, options.mib * 2**20 // rows.num_bytes)
    ways: dict[str, Callable[[], float]] = {
        "disk": lambda: plain_files(folder, rows, number),
        "shards": lambda: shards(folder, rows, number),
        "tap": lambda: StandInScheduler(folder, rows).run(number)["rate"],
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}  # seconds a GB, of all threads
    for turn in range(options.repeats + 1):
        for way, measure in ways.items():
            before = time.process_time()
            rate = measure()
            if turn:  # the first turn warms up
                rates[way].append(rate)
                cpu[way].append((time.process_time() - before) * 1e9 / (number * rows.num_bytes))
                tell(f"turn {turn} of {options.repeats}, {way}: {rate:.2f} GB/s")
    disk = statistics.median(rates["disk"])
    pace = min(options.pace, 0.8 * statistics.median(rates["tap"]))
    paced = []
    for _ in range(options.repeats):
        paced.append(StandInScheduler(folder, rows).run(number, pace))
        tell(f"at {pace:.2f} GB/s: blocked {paced[-1]['blocked']:.1%}, made {paced[-1]['rate']:.2f} GB/s")
    return {
        "disk_gb_per_second": round(disk, 3),
        "shards_gb_per_second": round(statistics.median(rates["shards"]), 3),
        "tap_gb_per_second": round(statistics.median(rates["tap"]), 3),
        **{f"{way}_cpu_seconds_per_gb": round(statistics.median(values), 2) for way, values in cpu.items()},
        "shards_to_disk": ratio(rates["shards"], rates["disk"]),
        "tap_to_disk": ratio(rates["tap"], rates["disk"]),
        "pace_gb_per_second": round(pace, 3),
        "paced_gb_per_second": round(statistics.median(run["rate"] for run in paced), 3),
        "scheduler_blocked": round(statistics.median(run["blocked"] for run in paced), 4),
        "longest_hook_milliseconds": round(1000 * statistics.median(run["longest"] for run in paced), 1),
        "gb_per_turn": round(number * rows.num_bytes / 1e9, 2),
    }


class MadeUpRows:
    """The states of one request, as a model hands them on: a tensor per captured layer, and the final state."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.layers = [self._states(numbers) for _ in SLOTS[1:]]
        self.final = self._states(numbers)
        self.input_ids = torch.arange(ROWS)
        self.num_bytes = len(SLOTS) * self.final.nbytes

    @staticmethod
    def _states(numbers: torch.Generator) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=numbers).to(torch.bfloat16)


def plain_files(folder: Path, rows: MadeUpRows, number: int) -> float:
    """GB/s of plain sequential files as large as a request's, each flushed as the tap and the shard writer do."""
    data = [state.view(torch.uint8).numpy() for state in (*rows.layers, rows.final)]
    start = time.monotonic()
    for place in range(number):
        with (folder / f"plain-{place}").open("wb") as file:
            for piece in data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    return finish(start, folder, "plain-*", rows, number)


def shards(folder: Path, rows: MadeUpRows, number: int) -> float:
    """GB/s of the shard writer: samples that lie in memory as staged ones do, checked, hashed, packed, flushed."""
    points = tuple(CapturePoint(name) for name in SLOTS)
    staged = torch.cat(rows.layers, dim=1).split(WIDTH, dim=1)
    states = dict(zip(points, (*staged, rows.final), strict=True))
    start = time.monotonic()
    writer = DumpWriter(folder / "shards", CaptureSpec(aux=points[:-1], final=points[-1]), hidden_size=WIDTH)
    for place in range(number):
        writer.add(CapturedSample(str(place), rows.input_ids, 7, ROWS - 1, 2, "length", states))
    writer.finish()
    return finish(start, folder, "shards/*", rows, number)


def finish(start: float, folder: Path, pattern: str, rows: MadeUpRows, number: int) -> float:
    """GB/s since `start`; the files go."""
    rate = number * rows.num_bytes / (time.monotonic() - start) / 1e9
    for path in folder.glob(pattern):
        path.unlink()
    return rate


class StandInScheduler:
    """The turns of a scheduler as far as the tap sees them: two passes of prefill to a request, then its answer."""

    def __init__(self, folder: Path, rows: MadeUpRows) -> None:
        tap_module.is_writer = lambda: True  # only SGLang's own processes know their rank
        self._staging, self._rows = folder / "staging", rows
        self._staging.mkdir(exist_ok=True)
        self._tap = tap_module.Tap(self._staging)
        self._tap._announced = True  # there is no live model to tell of
        self._runner = SimpleNamespace(is_draft_worker=False, server_args=SimpleNamespace(speculative_eagle_topk=None))
        self._hooks: list[float] = []  # seconds
        self._answered: list[str] = []

    def run(self, number: int, pace: float | None = None) -> dict[str, float]:
        """`number` requests one after another, their rows made at `pace` GB/s: as fast as they go where it is None."""
        half = ROWS // 2
        seconds = self._rows.num_bytes / 2 / 1e9 / pace if pace else 0.0
        start = due = time.monotonic()
        for place in range(number):
            req = made_up_request(f"made-up-{place:06d}", self._rows)
            for first in (0, half):
                due = max(due, time.monotonic()) + seconds  # a late pass is not made up for
                self._pass(req, first, first + half)
                time.sleep(max(0.0, due - time.monotonic()))  # a GPU computes
            req.output_ids, req.is_finished = [7], True
            self._hook(self._tap.on_answer, self, [req], False, None)
            self._hook(self._tap.release)
        busy = time.monotonic() - start
        while len(self._answered) < number:  # an idle scheduler
            self._tap.doze(lambda: None)
            self._tap.release()
        rate = number * self._rows.num_bytes / (time.monotonic() - start) / 1e9
        self._check()
        return {"rate": rate, "blocked": sum(self._hooks) / busy, "longest": max(self._hooks)}

    def stream_output(self, reqs: list[Any], _return_logprob: bool) -> None:
        """Where the tap sends the answers that it held back: as in SGLang, they pass its hook again."""
        self._tap.on_answer(self, reqs)
        self._answered += [req.rid for req in reqs]

    def _pass(self, req: Any, first: int, last: int) -> None:
        rows = self._rows
        forward_batch = SimpleNamespace(
            rids=[req.rid],
            extend_seq_lens_cpu=[last - first],
            batch_size=1,
            positions=torch.arange(first, last),
            forward_mode=SimpleNamespace(
                is_target_verify=lambda: False, is_decode=lambda: False, is_extend=lambda: True
            ),
        )
        self._hook(self._tap.on_batch_built, forward_batch, None, SimpleNamespace(reqs=[req]), self._runner)
        self._hook(
            self._tap.on_states,
            None,
            rows.input_ids[first:last],
            rows.final[first:last],
            None,
            forward_batch,
            aux_hidden_states=[layer[first:last] for layer in rows.layers],
        )

    def _hook(self, hook: Callable[..., Any], *args: Any, **named: Any) -> None:
        start = time.monotonic()
        hook(*args, **named)
        self._hooks.append(time.monotonic() - start)

    def _check(self) -> None:
        """Every file is there, and the last one holds what was made up."""
        for rid in self._answered:
            staged = read_staged(staged_path(self._staging, rid), num_slots=len(SLOTS) - 1, hidden_size=WIDTH)
        if not all(map(torch.equal, (*staged.aux, staged.final), (*self._rows.layers, self._rows.final))):
            raise SystemExit(f"{rid}: other rows than were made")
        for path in self._staging.iterdir():
            path.unlink()


def made_up_request(rid: str, rows: MadeUpRows) -> Any:
    """What the tap asks of SGLang's request object."""
    req = SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(custom_params={"tap": True}, n=1, beam_width=None, max_new_tokens=1),
        origin_input_ids=rows.input_ids.tolist(),
        output_ids=[],
        finished_len=1,
        finished_output=False,
        finished_reason=SimpleNamespace(to_json=lambda: {"type": "length"}),
        is_finished=False,
    )
    req.finished = lambda: req.is_finished
    return req


if __name__ == "__main__":
    main()
