"""False alarms: 100 right dumps of unlike kinds through the real SGLang tap, every check on each, none may fail.

    python benchmarks/clean_dumps.py [--work FOLDER] [--only capture|judge] [--servers llama-float32 ...] [--json]

Five targets (tiny Llama, Qwen3, DeepSeek-V3 dense and with experts, SmolLM2-135M), each served in float32, in bfloat16,
and in bfloat16 from weights that were rounded to int8 while the evidence rests on the original ones. A dump for each of
five domains, at batch sizes from 1 to 16, one of sampled answers, and in the first two one of long prompts with short
answers. A server starts once for its seven dumps, each with a probe. What is done is kept in the folder, so that a run
goes on where it was stopped; the judgement is separate, and says which checks gave it. The seed is
used nowhere else; texts are drawn from the pools of `tests.texts` and the project's word problems.

Exit code 1 where a check failed on a clean dump.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from eagle3 import evidence
from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.digests import sha256_file, sha256_json
from eagle3.dump.probe import read_probe, write_probe
from eagle3.dump.reader import DumpReader
from eagle3.evidence.head import FinalStateParts
from eagle3.evidence.references import TargetReference
from eagle3.evidence.report import EvidenceReport
from eagle3.evidence.validate import validate_dump
from eagle3.prompts import TokenizedPrompt
from eagle3.target import Target
from infra.quiet import quiet_libraries
from infra.settings import Settings
from infra.sglang.installed import sglang_version
from infra.sglang.launch import CaptureServing, ServerConfig
from infra.sglang.server import start_server
from infra.smollm2 import ensure_smollm2
from tasks.probe import take_probe
from tests import targets
from tests.dumps import write_dump
from tests.served import Asked, capture_served, captured, load_served, round_weights_to_int8, token_ids
from tests.texts import DOMAINS, chosen, random_ids

Kind = Literal["greedy", "sampled", "long prompts"]
SEED = 90210
"""Of weights and prompts here; the tests and the measurements behind the thresholds use small ones."""
BATCHES = (1, 4, 8, 16, 2)
SMALLEST = 6  # prompts of a dump
PROMPT_TOKENS, NEW_TOKENS = 40, 24
TEMPERATURE = 0.8
LONG_PROMPT, SHORT_ANSWER = 96, 10
MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: targets.make_llama(folder, dtype=torch.bfloat16, seed=SEED),
    "qwen3": lambda folder: targets.make_qwen3(folder, dtype=torch.bfloat16, seed=SEED),
    "deepseek": lambda folder: targets.make_deepseek(folder, dtype=torch.bfloat16, seed=SEED),
    "deepseek-moe": lambda folder: targets.make_deepseek(folder, moe=True, dtype=torch.bfloat16, seed=SEED),
    "smollm2": lambda _folder: ensure_smollm2(Settings().root),
}
SERVINGS = ("float32", "bfloat16", "int8")
# Captured layers by serving, so that every depth is met. DeepSeek's rule cannot express `layers.0` first.
TINY = {"float32": (1, 3, 5), "bfloat16": (2, 4, 6), "int8": (0, 2, 6)}
LATENT = TINY | {"int8": (1, 2, 6)}
SMOLLM2 = {"float32": (2, 15, 27), "bfloat16": (5, 20, 28), "int8": (0, 10, 24)}


@dataclass(frozen=True)
class Case:
    """One server of the campaign: a target, and how it is served."""

    target: str
    serving: str

    @property
    def name(self) -> str:
        return f"{self.target}-{self.serving}"

    @property
    def spec(self) -> CaptureSpec:
        layers = SMOLLM2 if self.target == "smollm2" else LATENT if "deepseek" in self.target else TINY
        return CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in layers[self.serving]))

    def asks(self, target: Target) -> Iterator[tuple[str, Kind, Asked]]:
        """(domain, kind, what to ask) of every dump of this server."""
        number = CASES.index(self)
        kinds: list[tuple[str, Kind]] = [(domain, "greedy") for domain in DOMAINS]
        kinds.append((DOMAINS[number % 4], "sampled"))
        if self.serving != "int8":
            kinds.append((DOMAINS[(number + 1) % 4], "long prompts"))
        for place, (domain, kind) in enumerate(kinds):
            batch = BATCHES[(number + place) % len(BATCHES)]
            count, seed = max(SMALLEST, batch), SEED + 100 * number + place
            length = LONG_PROMPT if kind == "long prompts" else PROMPT_TOKENS
            if domain == "random ids":
                texts = random_ids(count, length, target.vocab_size, seed)
            else:
                texts = token_ids(target, chosen(domain, count, seed), length)
            yield (
                domain,
                kind,
                Asked(
                    name=f"{self.name}-{domain}-{kind}".replace(" ", "-"),
                    texts=texts,
                    temperature=TEMPERATURE if kind == "sampled" else 0.0,
                    new_tokens=SHORT_ANSWER if kind == "long prompts" else NEW_TOKENS,
                    streams=batch,
                    # A language model ends many a bare text at once, and an answer of one token trains nothing.
                    ignore_eos=kind == "long prompts" and self.target == "smollm2",
                ),
            )


CASES = tuple(Case(target, serving) for target in MAKERS for serving in SERVINGS)


@cache
def open_target(work: Path, name: str) -> Target:
    folder = work / "targets" / name
    if name != "smollm2" and folder.exists():
        return Target.open(folder, cache_dir=work)
    return Target.open(MAKERS[name](folder), cache_dir=work)


def capture(work: Path, case: Case, say: Callable[[str], None]) -> None:
    """Start the case's server and capture its dumps that are not there yet."""
    target, staging = open_target(work, case.target), work / case.name
    every = [asked for *_, asked in case.asks(target)]
    missing = [a for a in every if not ((staging / f"{a.name}.json").exists() and probe_path(staging, a).exists())]
    if not missing:
        return
    path, dtype = target.path, "float32" if case.serving == "float32" else "bfloat16"
    if case.serving == "int8":
        path = round_weights_to_int8(target.path, work / "targets" / f"{case.target}-int8")
    settings = Settings(sglang_device="cpu", sglang_start_timeout=600)
    ids = ids_of(
        case.spec.aux,
        engine="sglang",
        version=sglang_version(settings),
        model_class=target.model_class,
        num_layers=target.num_layers,
    )
    config = ServerConfig.model_validate(
        {
            "target": path,
            "device": "cpu",
            "dtype": dtype,
            "capture": CaptureServing(ids=ids, staging=staging),
            "max_running_requests": max(BATCHES),
            "max_total_tokens": 8192,
        }
    )
    for stale in staging.glob("live.*.json"):  # of a server that was stopped
        stale.unlink()
    started = time.monotonic()
    with start_server(config, settings=settings, log_path=work / f"{case.name}.log") as server:
        say(f"{case.name}: served after {time.monotonic() - started:.0f} s")
        for asked in missing:
            started = time.monotonic()
            prompts = [TokenizedPrompt(rid, tuple(text)) for rid, text in zip(asked.rids, asked.texts, strict=True)]
            probe = take_probe(server.client, staging, target, case.spec.points, prompts)
            write_probe(probe_path(staging, asked), probe)
            if not (staging / f"{asked.name}.json").exists():
                served = capture_served(server, staging, asked, spec=case.spec, ids=ids)
                (staging / f"{asked.name}.json").write_text(served.model_dump_json())
            say(f"  {asked.name}: {len(asked.texts)} samples in {time.monotonic() - started:.1f} s")


def probe_path(staging: Path, asked: Asked) -> Path:
    return staging / f"{asked.name}.probe"


def judge(work: Path, case: Case, reference: TargetReference, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every check on every dump of a server; what was judged by the same checks before is taken from the folder."""
    target, staging = open_target(work, case.target), work / case.name
    results = []
    for domain, kind, asked in case.asks(target):
        if not (staging / f"{asked.name}.json").exists():
            say(f"{asked.name}: not captured yet")
            continue
        path = staging / f"{asked.name}.result.json"
        result = json.loads(path.read_text()) if path.exists() else None
        if result is None or result["checks_sha256"] != checks_sha256():
            served = load_served(staging / f"{asked.name}.json")
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "dump"
                write_dump(
                    captured(served, staging, target),
                    folder,
                    spec=served.spec,
                    probe=read_probe(probe_path(staging, asked)) if probe_path(staging, asked).exists() else False,
                    engine=served.engine,
                    generation=served.generation,
                )
                report = validate_dump(DumpReader.open(folder), FinalStateParts.of(target), reference=reference)
            result = result_of(case, domain, kind, asked, report)
            path.write_text(json.dumps(result, indent=1))
            say(f"{asked.name}: {report.verdict}" + "".join(f"; {c.name}: {c.sentence}" for c in report.failed()))
        results.append(result)
    return results


def result_of(case: Case, domain: str, kind: Kind, asked: Asked, report: EvidenceReport) -> dict[str, Any]:
    slots = report.attribution.slots if report.attribution else ()
    return {
        "dump": asked.name,
        "target": case.target,
        "serving": case.serving,
        "domain": domain,
        "kind": kind,
        "samples": len(asked.texts),
        "batch": asked.streams,
        "checks": {check.name: check.verdict for check in report.checks},
        "sentences": {check.name: check.sentence for check in report.checks if check.verdict != "pass"},
        "slots": [
            {
                "slot": slot.label,
                "found": str(slot.found),
                "error": slot.error,
                "next": str(slot.runner_up),
                "next_error": slot.runner_up_error,
                "bound": slot.bound,
            }
            for slot in slots
        ],
        "check_set": report.check_set_version,
        "thresholds_sha256": report.thresholds_digest(),
        "checks_sha256": checks_sha256(),
    }


@cache
def checks_sha256() -> str:
    """Of the sources of all checks: what judged, and that it was the same for all."""
    folder = Path(str(evidence.__file__)).parent
    return sha256_json([sha256_file(path) for path in sorted(folder.glob("*.py"))])


def figures(results: Sequence[dict[str, Any]]) -> str:
    """The campaign as markdown: dumps, alarms, and the margins by target, serving and depth."""
    alarms = [r for r in results if "fail" in r["checks"].values()]
    warned = Counter(name for r in results for name, verdict in r["checks"].items() if verdict == "warn")
    lines = [
        f"{len(results)} clean dumps through the real tap, {sum(r['samples'] for r in results)} samples: "
        f"**{len(alarms)} with a failed check**. Warnings: "
        + (", ".join(f"{name} in {count}" for name, count in warned.most_common()) or "none")
        + f". Check set {results[0]['check_set']}, thresholds `{results[0]['thresholds_sha256'][:12]}`.",
        "",
        "| target | served in | dumps | samples | failed | warned |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for (target, serving), group in grouped(results, "target", "serving"):
        names = sorted({name for r in group for name, verdict in r["checks"].items() if verdict == "warn"})
        failed = sum("fail" in r["checks"].values() for r in group)
        samples = sum(r["samples"] for r in group)
        lines.append(f"| {target} | {serving} | {len(group)} | {samples} | {failed} | {', '.join(names) or '-'} |")
    lines += ["", "| domain | kind | dumps | failed |", "| --- | --- | ---: | ---: |"]
    for (domain, kind), group in grouped(results, "domain", "kind"):
        lines.append(f"| {domain} | {kind} | {len(group)} | {sum('fail' in r['checks'].values() for r in group)} |")
    lines += [
        "",
        "| target | served in | slot | error, largest | next nearest, smallest | times as far | bound |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    slots = [{**r, **slot} for r in results for slot in r["slots"]]
    for (target, serving, slot), group in grouped(slots, "target", "serving", "slot"):
        error, closest = max(s["error"] for s in group), min(s["next_error"] for s in group)
        bound = min(s["bound"] for s in group)
        ratio = min(s["next_error"] / max(s["error"], 1e-9) for s in group)
        times = f"{ratio:.3g}" if ratio < 1000 else "over 1,000"
        lines.append(f"| {target} | {serving} | {slot} | {error:.2g} | {closest:.2g} | {times} | {bound:.2g} |")
    return "\n".join(lines) + "\n"


def grouped(rows: Sequence[dict[str, Any]], *keys: str) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Rows by the values of these keys, in the order in which they first appear."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return iter(groups.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Settings().root / "clean-dumps", help="where the work is kept")
    parser.add_argument("--servers", nargs="+", default=[case.name for case in CASES], metavar="TARGET-SERVING")
    parser.add_argument("--only", choices=["capture", "judge"])
    parser.add_argument("--json", action="store_true", help="print every dump's result instead of the figures")
    options = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    cases = [case for case in CASES if case.name in options.servers]

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    if options.only != "judge":
        for case in cases:
            capture(options.work, case, say)
    if options.only == "capture":
        return 0
    results: list[dict[str, Any]] = []
    for (target,), group in grouped([{"target": case.target, "case": case} for case in cases], "target"):
        reference = TargetReference(open_target(options.work, target))
        for one in group:
            results += judge(options.work, one["case"], reference, say)
    (options.work / "results.json").write_text(json.dumps(results, indent=1))
    print(json.dumps(results) if options.json else figures(results))
    return 1 if any("fail" in result["checks"].values() for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
