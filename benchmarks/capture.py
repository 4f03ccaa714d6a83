"""What capturing costs: answers a second with the tap asked for every request, against the same server unasked.

    python benchmarks/capture.py [--prompts 48] [--streams 24] [--threads 2] [--repeats 2] [--json]

One server (the demo's small model, capture mode on), the same prompts in turns asked, unasked, asked ..., and the ratio
of the medians. The staged files are written and thrown away.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from eagle3.capture import CapturePoint
from eagle3.conventions import ids_of
from eagle3.prompts import load_prompts, tokenize
from eagle3.target import Target
from infra.quiet import quiet_libraries
from infra.settings import Settings
from infra.sglang.client import GenerateRequest, SglangClient
from infra.sglang.installed import sglang_version
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import start_server
from infra.smollm2 import ensure_smollm2

PROMPTS = Path(__file__).resolve().parents[1] / "examples" / "word_problems.jsonl"
POINTS = tuple(CapturePoint(name) for name in ("layers.2", "layers.15", "layers.27"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    settings = Settings()
    target = Target.open(ensure_smollm2(settings.root), cache_dir=settings.root / "cache")
    prompts = tokenize(
        load_prompts(PROMPTS).prompts[: options.prompts],
        target.tokenizer(),
        context_length=target.context_length,
        max_new_tokens=options.new_tokens,
    )
    ids = ids_of(
        POINTS,
        engine="sglang",
        version=sglang_version(settings),
        model_class=target.model_class,
        num_layers=target.num_layers,
    )
    rates: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        staging = Path(folder) / "tap"
        config = ServerConfig(
            target=target.path,
            dtype="float32",
            threads=options.threads,
            capture=CaptureServing(ids=ids, staging=staging),
            max_running_requests=options.streams,
        )
        with start_server(config, settings=settings, log_path=Path(folder) / "server.log") as server:
            for turn in range(options.repeats + 1):
                for asked in (True, False):
                    rate = answer(server.client, [p.input_ids for p in prompts], turn, asked, options)
                    if turn:  # the first turn warms up
                        rates[asked].append(rate)
                    for path in staging.glob("*.safetensors"):
                        path.unlink()
    medians = {asked: statistics.median(values) for asked, values in rates.items()}
    figures = {
        "tokens_per_second_capturing": round(medians[True], 1),
        "tokens_per_second_not_capturing": round(medians[False], 1),
        "ratio": round(medians[True] / medians[False], 3),
        "repeats": options.repeats,
    }
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<34}{value}" for name, value in figures.items()))


def answer(
    client: SglangClient, prompts: list[tuple[int, ...]], turn: int, asked: bool, options: argparse.Namespace
) -> float:
    """Answer every prompt; generated tokens a second."""
    requests = [
        GenerateRequest(
            rid=f"{'tap' if asked else 'not'}-{turn:02d}-{n:05d}",
            input_ids=ids,
            max_new_tokens=options.new_tokens,
            tap=asked,
        )
        for n, ids in enumerate(prompts)
    ]
    start = time.monotonic()
    answers = client.generate_many(requests, streams=options.streams)
    return sum(len(found.output_ids) for found in answers) / (time.monotonic() - start)


if __name__ == "__main__":
    main()
