"""Real dumps for the tests and the clean-dump campaign: what the tap of a running SGLang captured, as a `Capture`."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file

from eagle3.capture import CaptureSpec
from eagle3.conventions import EngineIds
from eagle3.dump.manifest import EngineRecord, Generation
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.alignment import FinalStateParts
from eagle3.target import Target
from infra.sglang.client import GenerateRequest
from infra.sglang.server import SglangServer
from infra.sglang.staging import read_live, read_staged, staged_path
from tests.dumps import Capture


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Answered(_Record):
    """One request whose rows lie in the staging folder."""

    rid: str
    prompt_tokens: int
    output_tokens: int
    last_token_id: int
    finish_reason: str


class Served(_Record):
    """A dump as it came off a server: the staged files beside it hold its rows."""

    spec: CaptureSpec
    engine: EngineRecord
    generation: Generation
    answers: tuple[Answered, ...]


@dataclass(frozen=True)
class Asked:
    """What one dump asks for."""

    name: str
    texts: Sequence[Sequence[int]]
    temperature: float = 0.0
    new_tokens: int = 24
    streams: int = 8
    ignore_eos: bool = False

    @property
    def rids(self) -> list[str]:
        return [f"{self.name}-{number:04d}" for number in range(len(self.texts))]


def capture_served(server: SglangServer, staging: Path, asked: Asked, *, spec: CaptureSpec, ids: EngineIds) -> Served:
    """Send the requests, `streams` at a time. Their rows stay in the staging folder under `<name>-<number>`."""
    requests = [
        GenerateRequest(
            rid=rid,
            input_ids=tuple(text),
            max_new_tokens=asked.new_tokens,
            temperature=asked.temperature,
            ignore_eos=asked.ignore_eos,
            tap=True,
        )
        for rid, text in zip(asked.rids, asked.texts, strict=True)
    ]
    found = {answer.rid: answer for answer in server.client.generate_many(requests, streams=asked.streams)}
    answers = [
        Answered(
            rid=rid,
            prompt_tokens=len(text),
            output_tokens=len(found[rid].output_ids),
            last_token_id=found[rid].output_ids[-1],
            finish_reason=found[rid].finish_reason,
        )
        for rid, text in zip(asked.rids, asked.texts, strict=True)
    ]
    info, live = server.client.server_info(), read_live(staging)
    return Served(
        spec=spec,
        engine=EngineRecord(
            version=ids.version, ids=ids, live=live.capture, flags=info.model_dump(mode="json", exclude_none=True)
        ),
        generation=Generation(
            source="while_answering",
            temperature=asked.temperature,
            max_new_tokens=asked.new_tokens,
            ignore_eos=asked.ignore_eos,
        ),
        answers=tuple(answers),
    )


def captured(served: Served, staging: Path, target: Target) -> Capture:
    """The staged rows as samples, beside the parts of `target` (the checkpoint that the dump claims)."""
    slots, width = len(served.spec.aux), target.hidden_size
    samples = []
    for answer in served.answers:
        rows = read_staged(staged_path(staging, answer.rid), num_slots=slots, hidden_size=width)
        samples.append(
            CapturedSample(
                id=answer.rid,
                input_ids=rows.input_ids,
                last_token_id=answer.last_token_id,
                prompt_tokens=answer.prompt_tokens,
                output_tokens=answer.output_tokens,
                finish_reason=answer.finish_reason,
                states=dict(zip(served.spec.points, (*rows.aux, rows.final), strict=True)),
            )
        )
    parts = FinalStateParts.of(target)
    return Capture(target.path, target.identity(), tuple(samples), parts, served.generation.max_new_tokens)


def round_weights_to_int8(target: Path, folder: Path) -> Path:
    """A copy of a target whose layers' matrices went through int8 (255 steps for every output channel) and back.

    What a server computes that quantises these weights, in the target's own file format. Routers keep their weights, as
    they do in published quantised checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy2(file, folder / file.name)
            continue
        weights = load_file(file)
        for name, weight in weights.items():
            if ".layers." in name and weight.ndim == 2 and not name.endswith(".gate.weight"):
                step = weight.float().abs().amax(dim=-1, keepdim=True) / 127
                weights[name] = ((weight.float() / step).round() * step).to(weight.dtype)
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    return folder


def load_served(path: Path) -> Served:
    return Served.model_validate(json.loads(path.read_text()))


def token_ids(target: Target, texts: Sequence[str], length: int) -> list[list[int]]:
    """The first `length` tokens of every text, without special ones."""
    tokenizer = target.tokenizer()
    return [list(tokenizer(text, add_special_tokens=False).input_ids[:length]) for text in texts]
