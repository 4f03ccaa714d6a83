"""What an extraction needs of memory: the peak of its process for a small dump, and for one ten times as large.

    python benchmarks/memory.py [--shard-mib 64] [--mib 768] [--json]

Everything is real: a stack of its own, SGLang on the CPU with the tap, the extract flow in a process of its own,
uploads to the local S3 server. Only the target is made up: a wide Llama (4096) of four thin layers with random weights,
so that its rows (64 KiB a token) cost next to nothing to compute. `peak_mib` is the kernel's own figure (VmHWM: mapped
files count too). The local S3 server keeps in memory what it was sent: the large dump must fit there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.capture import CapturePoint
from eagle3.conventions import ids_of
from infra.settings import Settings
from infra.sglang.installed import sglang_version
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import start_server
from tests.e2e.stack import PROJECT, Command
from tests.targets import make_llama

HIDDEN, LAYERS = 4096, 4
AUX = tuple(CapturePoint(f"layers.{number}") for number in range(LAYERS - 1))
TIMES = 10  # how much larger the large dump is
STREAMS = 4
SENTENCE = "Tom has 3 apples and buys 4 more. The quick brown fox jumps over the lazy dog. "

EXTRACT = """
import json, re, sys
from pathlib import Path
from infra.settings import Settings
from infra.stack import connect
connect(Settings())
from flows.extract import extract
dump = extract(params=json.loads(sys.argv[1]))
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print("RESULT " + json.dumps({
    "peak_mib": int(peak) // 1024,
    "dump_mib": dump.num_bytes // 2**20,
    "samples": dump.num_samples,
    "tokens": dump.num_tokens,
    "seconds": round(dump.seconds),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard-mib", type=int, default=64)
    parser.add_argument(
        "--mib", type=int, default=960, help=f"the small dump's size; the large one's is {TIMES} times it"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        command = Command(Path(name) / "home")
        try:
            command.run("up")
            figures = measure(Path(name), command, options)
        finally:
            command.run("down")
    if options.json:
        print(json.dumps(figures))
        return
    for case, found in figures.items():
        print(f"{case:<24}" + "  ".join(f"{key} {value}" for key, value in found.items()))


def measure(folder: Path, command: Command, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of each case, by its name. The small dump comes once more in shards four times as large."""
    target = make_llama(folder / "target", hidden_size=HIDDEN, num_hidden_layers=LAYERS, initializer_range=0.02)
    settings = Settings(home=command.home)
    ids = ids_of(
        AUX,
        engine="sglang",
        version=sglang_version(settings),
        model_class="LlamaForCausalLM",
        num_layers=LAYERS,
    )
    config = ServerConfig(
        target=target,
        device="cpu",
        dtype="float32",
        threads=1,
        capture=CaptureServing(ids=ids, staging=folder / "tap"),
        max_running_requests=STREAMS,
    )
    shard = options.shard_mib
    with start_server(config, settings=settings, log_path=folder / "server.log") as server:
        bench = Bench(folder, command, target, server.url, folder / "tap")
        one = bench.extract("one-sample", 1, shard)
        num = options.mib // one["dump_mib"]
        return {
            "one-sample": one,
            "small": bench.extract("small", num, shard),
            "small-in-larger-shards": bench.extract("small-in-larger-shards", num, 4 * shard),
            "large": bench.extract("large", TIMES * num, shard),
        }


@dataclass(frozen=True)
class Bench:
    """A stack and a server that captures."""

    folder: Path
    command: Command
    target: Path
    url: str
    staging: Path

    def extract(self, name: str, num_prompts: int, shard_mib: int) -> dict[str, Any]:
        """Run the extract flow in a process of its own; what it says of itself at its end."""
        prompts = self.folder / f"{name}.jsonl"
        texts = (f"{number}: {7 * SENTENCE}" for number in range(num_prompts + 1))
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        params = {
            "name": name,
            "target": {"path": str(self.target)},
            "prompts": {"file": str(prompts), "num_heldout": 1},
            "capture": {"aux": AUX},
            "answers": {"max_new_tokens": 2},
            "serving": {
                "device": "cpu",
                "streams": STREAMS,
                "attach": self.url,
                "attach_staging": str(self.staging),
            },
            "shard_mib": shard_mib,
        }
        done = subprocess.run(
            [sys.executable, "-c", EXTRACT, json.dumps(params)],
            cwd=PROJECT,
            env=self.command.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not results:
            raise SystemExit(f"the extraction {name} failed:\n{(done.stdout + done.stderr)[-6000:]}")
        return {"shard_mib": shard_mib, **json.loads(results[-1].removeprefix("RESULT "))}


if __name__ == "__main__":
    main()
