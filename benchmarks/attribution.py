"""What attribution costs: a dump of SmolLM2-135M, every slot against every boundary of the target, one thread.

    python benchmarks/attribution.py [--samples 32] [--tokens 96] [--json]

The dump is made of texts that transformers reads in float32, stored in bfloat16. It is then attributed in a process of
its own, from the start of Python to the verdict. CPU seconds are user + system. Exit code 1 where it takes 30 CPU
seconds or more, or where the right dump is not proven.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="of a sample")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=2, type=Path, metavar=("DUMP", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        dump = Path(scratch) / "dump"
        target = make(dump, options.samples, options.tokens)
        command = [sys.executable, __file__, "--measure", str(dump), str(target)]
        started = time.monotonic()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        figures = json.loads(done.stdout) | {"seconds on the clock": round(time.monotonic() - started, 1)}
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<52}{value}" for name, value in figures.items()))
    return 0 if figures["CPU seconds in all"] < LIMIT and figures["verdict"] == "pass" else 1


def make(folder: Path, count: int, tokens: int) -> Path:
    """A right dump; returns the target's folder."""
    import torch

    from eagle3.capture import CapturePoint, CaptureSpec
    from eagle3.dump.writer import CapturedSample
    from eagle3.evidence.head import FinalStateParts
    from eagle3.target import Target
    from infra.quiet import quiet_libraries
    from infra.settings import Settings
    from infra.smollm2 import ensure_smollm2
    from tests.dumps import Capture, write_dump
    from tests.served import token_ids
    from tests.texts import chosen

    quiet_libraries()
    torch.set_num_threads(1)
    target = Target.open(ensure_smollm2(Settings().root))
    model = target.load_model(torch.float32)
    spec = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (2, 15, 27)))
    samples = []
    for number, ids in enumerate(token_ids(target, chosen("prose", count, seed=1), tokens)):
        states = target.hidden_states(model, ids[:-1])
        samples.append(
            CapturedSample(
                id=f"p{number:05d}",
                input_ids=torch.tensor(ids[:-1]),
                last_token_id=ids[-1],
                prompt_tokens=len(ids) // 2,
                output_tokens=len(ids) - len(ids) // 2,
                finish_reason="length",
                states={point: states[point] for point in spec.points},
            )
        )
    capture = Capture(target.path, target.identity(), tuple(samples), FinalStateParts.of(target), tokens)
    write_dump(capture, folder, spec=spec, dtype=torch.bfloat16, probe=False)
    return target.path


def measure(dump: Path, target: Path) -> dict[str, Any]:
    """Attribute, and say where the time went."""
    import torch

    from eagle3.capture import CapturePoint
    from eagle3.dump.reader import DumpReader
    from eagle3.evidence.attribution_check import check_attribution
    from eagle3.evidence.references import TargetReference
    from eagle3.target import Target
    from infra.quiet import quiet_libraries

    class Timed(TargetReference):
        """The reference, and how much of the work it was."""

        exact = coarse = 0.0

        def states(self, sample_id: str, input_ids: torch.Tensor) -> Mapping[CapturePoint, torch.Tensor] | None:
            started = time.process_time()
            result = super().states(sample_id, input_ids)
            self.exact += time.process_time() - started
            return result

        def coarse_states(
            self, input_ids: torch.Tensor, dtype: str, *, int8: bool = True
        ) -> Mapping[CapturePoint, torch.Tensor]:
            started = time.process_time()
            result = super().coarse_states(input_ids, dtype, int8=int8)
            self.coarse += time.process_time() - started
            return result

    quiet_libraries()
    torch.set_num_threads(1)
    imported = time.process_time()
    reference = Timed(Target.open(target))
    _ = reference.model
    loaded = time.process_time()
    reader = DumpReader.open(dump)
    check, _ = check_attribution(reader, reference)
    done = time.process_time()
    return {
        "samples of the dump": len(reader),
        "rows of the dump": reader.manifest.num_tokens,
        "compared": check.value.split(";")[0],
        "verdict": check.verdict,
        "CPU seconds in all": round(done, 1),
        "CPU seconds, start of Python and imports": round(imported, 1),
        "CPU seconds, loading the target": round(loaded - imported, 1),
        "CPU seconds, the target's states": round(reference.exact, 1),
        "CPU seconds, its states in coarser arithmetic": round(reference.coarse, 1),
        "CPU seconds, comparing": round(done - loaded - reference.exact - reference.coarse, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
