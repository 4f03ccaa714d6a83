"""Real small dumps for the tests: a tiny target of `tests.targets` answers greedily under transformers, and every
boundary of its residual stream is kept, so that a test can write a right dump or plant a fault in one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from eagle3.capture import CapturePoint, CaptureSpec, all_points
from eagle3.conventions import ids_of
from eagle3.conventions.sglang import boundaries
from eagle3.digests import canonical_json, sha256_bytes, sha256_file
from eagle3.dump.files import write_manifest
from eagle3.dump.manifest import (
    SAMPLES_NAME,
    EngineRecord,
    FileEntry,
    Generation,
    LiveCapture,
    Manifest,
    SampleRecord,
    TargetIdentity,
    TokenizerIdentity,
    spec_digest,
)
from eagle3.dump.probe import (
    MAX_TOKENS,
    PROBE_NAME,
    Probe,
    ProbedSequence,
    chosen_samples,
    fixed_texts,
    write_probe,
)
from eagle3.dump.writer import CapturedSample, DumpWriter
from eagle3.evidence.alignment import FinalStateParts
from eagle3.evidence.references import TargetReference
from eagle3.evidence.report import EvidenceReport
from eagle3.target import Target

ENGINE_VERSION = "0.5.23"
SPEC = CaptureSpec(aux=(CapturePoint("layers.1"), CapturePoint("layers.3"), CapturePoint("layers.5")))

Alter = Callable[[CapturedSample], CapturedSample]


@dataclass(frozen=True)
class Capture:
    """What a target did: every point of every sample, and the parts of the target that the checks need."""

    target: Path
    identity: TargetIdentity
    samples: tuple[CapturedSample, ...]  # states at all points, float32 or the target's own dtype
    parts: FinalStateParts
    max_new_tokens: int
    texts: tuple[ProbedSequence, ...] = ()  # the probe's fixed texts, at all points


@cache
def capture(
    target: Path,
    *,
    dtype: torch.dtype = torch.float32,
    num_samples: int = 8,
    max_new_tokens: int = 24,
    seed: int = 0,
    temperature: float = 0.0,
    lengths: tuple[int, ...] = (),
) -> Capture:
    """Let the target answer `num_samples` random prompts of unlike lengths (5, 8, 11 ..., or `lengths` in turns),
    greedily or sampling from its whole distribution, and keep every boundary.

    Done once per test run for the same arguments: do not write into its tensors.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of the answers that are sampled
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    samples = []
    for index in range(num_samples):
        length = lengths[index % len(lengths)] if lengths else 5 + 3 * index
        prompt = torch.randint(3, model.config.vocab_size, (1, length), generator=generator)
        full = model.generate(prompt, max_new_tokens=max_new_tokens, **sampling)[0]
        output_tokens = len(full) - prompt.shape[1]
        samples.append(
            CapturedSample(
                id=f"p{index:05d}",
                input_ids=full[:-1].clone(),
                last_token_id=int(full[-1]),
                prompt_tokens=prompt.shape[1],
                output_tokens=output_tokens,
                finish_reason="stop" if int(full[-1]) == model.config.eos_token_id else "length",
                states=states_of(model, full[:-1]),
            )
        )
    parts = FinalStateParts.of(Target.open(target))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    texts = tuple(
        ProbedSequence("text", name, torch.tensor(ids), states_of(model, torch.tensor(ids)), {})
        for name, ids in fixed_texts(tokenizer).items()
    )
    return Capture(target, identity_of(target), tuple(samples), parts, max_new_tokens, texts)


@torch.no_grad()
def states_of(model: Any, ids: torch.Tensor) -> dict[CapturePoint, torch.Tensor]:
    """Every capture point [T, H] of one sequence [T], taken by hooks on the modules whose output it is."""
    points = all_points(model.config.num_hidden_layers)
    modules = [model.model.embed_tokens, *model.model.layers, model.model.norm]
    states: dict[CapturePoint, torch.Tensor] = {}

    def keep(point: CapturePoint, _module: Any, _args: Any, output: Any) -> None:
        states[point] = (output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1).clone()

    handles = [m.register_forward_hook(partial(keep, p)) for p, m in zip(points, modules, strict=True)]
    try:
        model(ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states


def identity_of(target: Path) -> TargetIdentity:
    return Target.open(target).identity()


def write_dump(
    captured: Capture,
    folder: Path,
    *,
    spec: CaptureSpec = SPEC,
    alter: Alter | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 96 * 1024,
    probe: Probe | bool = True,
    **changes: Any,
) -> Manifest:
    """Write the captured samples as a finished dump. `alter` plants a fault in a sample; `changes` go to the manifest.

    States are stored in `dtype` (default: as they were captured). The default shard size makes several shards. The
    probe is a right one whatever `alter` does, unless another one is given, or False for a dump without; a capture that
    holds some boundaries alone (`texts` is empty) has none.
    """
    writer = DumpWriter(folder, spec, hidden_size=captured.identity.hidden_size, shard_bytes=shard_bytes)
    for sample in captured.samples:
        altered = alter(sample) if alter else sample
        states = {p: altered.states[p] if dtype is None else altered.states[p].to(dtype) for p in spec.points}
        writer.add(replace(altered, states=states))
    files = writer.finish()
    if probe is True and captured.texts:
        probe = probe_of(captured, spec, dtype=dtype)
    prompts = sha256_bytes(canonical_json([s.input_ids[: s.prompt_tokens].tolist() for s in captured.samples]))
    generation = Generation(source="while_answering", max_new_tokens=captured.max_new_tokens)
    tokenizer = TokenizerIdentity(sha256=sha256_file(captured.target / "tokenizer.json"))
    fields = {
        "created_at": datetime.now(UTC),
        "spec": spec,
        "spec_digest": spec_digest(spec, captured.identity, tokenizer, prompts, generation),
        "content_digest": files.content_digest,
        "dtype": files.dtype,
        "target": captured.identity,
        "tokenizer": tokenizer,
        "engine": changes.get("engine") or engine_record(captured.identity, spec),
        "prompts_sha256": prompts,
        "generation": generation,
        "num_samples": files.num_samples,
        "num_tokens": files.num_tokens,
        "num_cut": files.num_cut,
        "shards": files.shards,
        "samples": files.samples,
        "probe": write_probe(folder / PROBE_NAME, probe) if isinstance(probe, Probe) else None,
        "packages": {"torch": torch.__version__},
    }
    manifest = Manifest.model_validate(fields | changes)
    write_manifest(folder, manifest)
    return manifest


def probe_of(captured: Capture, spec: CaptureSpec = SPEC, *, dtype: torch.dtype | None = None) -> Probe:
    """A right probe of the captured target: the fixed texts and the beginnings of three prompts."""
    heads = [captured.samples[index] for index in chosen_samples(len(captured.samples))]
    sequences = [*captured.texts]
    for sample in heads:
        length = min(sample.prompt_tokens, MAX_TOKENS)
        states = {point: state[:length] for point, state in sample.states.items()}
        sequences.append(ProbedSequence("sample", sample.id, sample.input_ids[:length], states, {}))
    stored = []
    for sequence in sequences:
        states = {p: state if dtype is None else state.to(dtype) for p, state in sequence.boundaries.items()}
        stored.append(replace(sequence, boundaries=states, captured={p: states[p] for p in spec.points}))
    return Probe.of(
        stored,
        spec.points,
        engine=f"sglang {ENGINE_VERSION}",
        model_class=captured.identity.model_class,
        tap_version="1",
    )


def make_dump(target: Path, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Manifest:
    """A right dump of a tiny target in one call: run the target, write the dump."""
    return write_dump(capture(target, dtype=dtype), folder, **options)


@cache
def reference_of(target: Path) -> TargetReference:
    """The target itself, in float32; loaded once per test run."""
    return TargetReference(Target.open(target))


def unpassed(report: EvidenceReport) -> set[str]:
    """The checks that did not pass. Without a reference `attribution` is one of them."""
    return {check.name for check in report.checks if check.verdict != "pass"}


def engine_record(
    identity: TargetIdentity, spec: CaptureSpec, *, live: tuple[int, ...] | None = None, **changes: Any
) -> EngineRecord:
    """The record of an SGLang that was asked for the spec; `live` is another list than the one it should hold."""
    ids = ids_of(
        spec.aux,
        engine="sglang",
        version=ENGINE_VERSION,
        model_class=identity.model_class,
        num_layers=identity.num_layers,
    )
    held = live or boundaries(ids.version, ids.model_class, identity.num_layers, ids.ids)
    fields = {
        "version": ENGINE_VERSION,
        "ids": ids,
        "live": LiveCapture(model_class=identity.model_class, layers_to_capture=held, tap_version="1"),
        "flags": {"disable_radix_cache": True},
    }
    return EngineRecord.model_validate(fields | changes)


def reseal(folder: Path, records: list[SampleRecord] | None = None, **changes: Any) -> Manifest:
    """Publish a dump again after its files were changed, with sizes and digests that fit: what a faulty writer, or an
    attacker, would leave. `records` replaces samples.jsonl, `changes` fields of the manifest.
    """
    manifest = Manifest.parse((folder / "manifest.json").read_bytes(), where=str(folder))
    if records is not None:
        lines = [canonical_json(record.model_dump(mode="json")) + b"\n" for record in records]
        (folder / SAMPLES_NAME).write_bytes(b"".join(lines))
    fields: dict[str, Any] = manifest.model_dump() | {
        "samples": FileEntry(**_size_and_digest(folder / SAMPLES_NAME)),
        "shards": [
            entry.model_dump()
            | _size_and_digest(folder / entry.name)
            | ({"answers": _size_and_digest(folder / entry.answers.name)} if entry.answers else {})
            for entry in manifest.shards
        ],
        "probe": FileEntry(**_size_and_digest(folder / manifest.probe.name)) if manifest.probe else None,
    }
    (folder / "manifest.json").unlink()
    sealed = Manifest.model_validate(fields | changes)
    write_manifest(folder, sealed)
    return sealed


def flip_bit(path: Path, *, at: float = 0.5) -> None:
    """Flip one bit of a file, at that share of its length."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(bytes(data))


def with_states(sample: CapturedSample, states: Mapping[str, torch.Tensor]) -> CapturedSample:
    """The sample with some of its states replaced."""
    return replace(sample, states=dict(sample.states) | {CapturePoint(p): state for p, state in states.items()})


def _size_and_digest(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
