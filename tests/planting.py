"""How a mistake is planted in a real dump.

It is planted where it would happen: in the states as they are captured (the dump's own digests then fit), or in the
files afterwards. The labels, the engine's record and the live model's list say what a right dump would say, unless they
are the mistake: what is found is found in the tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.conventions.sglang import boundaries
from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from tests.dumps import ENGINE_VERSION, Capture, engine_record, flip_bit, reseal, with_states, write_dump

MIN_ANSWER = 8
Planted = Callable[["Scene"], None]


@dataclass(frozen=True)
class Scene:
    """Where a mistake is planted: what a target really did, and the three slots that the dump declares."""

    captured: Capture
    spec: CaptureSpec
    folder: Path
    dtype: torch.dtype | None = None
    other: Capture | None = None
    """The same prompts under other weights; None where they were not made."""

    @property
    def low(self) -> CapturePoint:
        return self.spec.aux[0]

    @property
    def mid(self) -> CapturePoint:
        return self.spec.aux[1]

    @property
    def high(self) -> CapturePoint:
        return self.spec.aux[2]

    @property
    def last(self) -> CapturePoint:
        return CapturePoint.at_boundary(self.captured.identity.num_layers)

    @property
    def embedding_id(self) -> int:
        """The id that captures the embedding where this target is served: the model class decides."""
        model_class, num_layers = self.captured.identity.model_class, self.captured.identity.num_layers
        embed_first = (CapturePoint("embed"), self.low, self.mid)
        return ids_of(
            embed_first, engine="sglang", version=ENGINE_VERSION, model_class=model_class, num_layers=num_layers
        ).ids[0]

    @property
    def victim(self) -> str:
        """The sample that a mistake of a single sample strikes: the one whose answer is least like the last one's.

        A tiny target with random weights ends many answers in the same loop.
        """
        *others, last = self.captured.samples

        def unlike(sample: CapturedSample) -> float:
            rows = slice(sample.prompt_tokens, len(sample.input_ids))
            return float((sample.input_ids[rows] != last.input_ids[rows]).float().mean())

        fitting = (s for s in others if s.output_tokens > MIN_ANSWER and len(s.input_ids) <= len(last.input_ids))
        return max(fitting, key=unlike).id

    def write(
        self, change: Callable[[CapturedSample], Mapping[str, torch.Tensor]] | None = None, **options: Any
    ) -> None:
        """Write the dump; `change` gives the states that a sample gets in place of its own."""
        options = {"spec": self.spec, "dtype": self.dtype} | options
        alter = None if change is None else lambda sample: with_states(sample, change(sample))
        write_dump(self.captured, self.folder, alter=options.pop("alter", alter), **options)

    def normed(self, state: torch.Tensor) -> torch.Tensor:
        """The target's final norm of a state."""
        x, parts = state.float(), self.captured.parts
        norm = torch.rsqrt(x.square().mean(-1, keepdim=True) + parts.rms_norm_eps)
        return (x * norm * parts.final_norm.float()).to(state.dtype)


def later(point: CapturePoint, by: int) -> CapturePoint:
    assert point.boundary is not None
    return CapturePoint.at_boundary(point.boundary + by)


def shift_points(by: int) -> Callable[[Scene], None]:
    return lambda scene: scene.write(lambda s: {p: s.states[later(p, by)] for p in scene.spec.aux})


def roll(by: int, *, aux_only: bool = False) -> Callable[[Scene], None]:
    def plant(scene: Scene) -> None:
        points = scene.spec.aux if aux_only else scene.spec.points
        scene.write(lambda s: {p: s.states[p].roll(by, 0) for p in points})

    return plant


def scale(factor: float) -> Callable[[Scene], None]:
    return lambda scene: scene.write(lambda s: {scene.mid: s.states[scene.mid] * factor})


def layers_called_embed(scene: Scene) -> None:
    """The story: [2, 30, 58] captured, and the list read as [embed, 2, 30]."""
    low, mid, high = scene.spec.aux
    spec = CaptureSpec(aux=(CapturePoint("embed"), low, mid))
    scene.write(lambda s: {"embed": s.states[low], low: s.states[mid], mid: s.states[high]}, spec=spec)


def embed_called_layer(scene: Scene) -> None:
    """The wrong mending of it: [-1, 2, 15] captured, under the names of the layers that were wanted."""
    low, mid, high = scene.spec.aux
    scene.write(lambda s: {low: s.states[CapturePoint("embed")], mid: s.states[low], high: s.states[mid]})


def default_list(scene: Scene) -> None:
    layers = scene.captured.identity.num_layers
    held = [CapturePoint.at_boundary(b) for b in (2, layers // 2, layers - 3)]
    scene.write(lambda s: {p: s.states[q] for p, q in zip(scene.spec.aux, held, strict=True)})


def ids_of_another_version(scene: Scene) -> None:
    engine = engine_record(scene.captured.identity, scene.spec)
    ids = engine.ids.model_copy(update={"version": "0.5.12"})
    scene.write(engine=engine.model_copy(update={"ids": ids}))


def live_list_differs(scene: Scene) -> None:
    identity = scene.captured.identity
    held = tuple(later(p, 1).boundary or 0 for p in scene.spec.aux)
    scene.write(engine=engine_record(identity, scene.spec, live=held))


def ids_of_another_engine(scene: Scene) -> None:
    """Another engine's numbers for the same layers, sent as they are: vLLM counts boundaries, TensorRT-LLM outputs."""
    identity, engine = scene.captured.identity, engine_record(scene.captured.identity, scene.spec)
    stream = [p.boundary or 0 for p in scene.spec.aux]
    for ids in (tuple(stream), tuple(b - 1 for b in stream), tuple(b + 1 for b in stream)):
        held = boundaries(engine.ids.version, identity.model_class, identity.num_layers, ids)
        if list(held) != stream:
            sent = engine.ids.model_copy(update={"ids": ids})
            scene.write(engine=engine_record(identity, scene.spec, live=held, ids=sent))
            return
    raise AssertionError("every list means the same here")


def rows_dropped(scene: Scene) -> None:
    """A prefix cache answered for the first rows: they are not there, and the record knows the whole prompt."""
    lost = 3

    def drop(sample: CapturedSample) -> CapturedSample:
        states = {p: state[lost:] for p, state in sample.states.items()}
        return replace(
            sample, input_ids=sample.input_ids[lost:], prompt_tokens=sample.prompt_tokens - lost, states=states
        )

    scene.write(alter=drop)
    records = [
        r.model_copy(update={"prompt_tokens": r.prompt_tokens + lost}) for r in DumpReader.open(scene.folder).records
    ]
    reseal(scene.folder, records)


def rows_padded(share: float) -> Callable[[Scene], None]:
    """The same, and zeros in the place of the rows that were not computed: that share of each sample."""

    def plant(scene: Scene) -> None:
        def pad(sample: CapturedSample) -> Mapping[str, torch.Tensor]:
            states: dict[str, torch.Tensor] = {p: sample.states[p].clone() for p in scene.spec.points}
            for state in states.values():
                state[: round(len(state) * share)] = 0
            return states

        scene.write(pad)

    return plant


def answers_empty(scene: Scene) -> None:
    """The decode path did not capture: the slots of every answer's rows are zeros, the rest is right."""

    def empty(sample: CapturedSample) -> Mapping[str, torch.Tensor]:
        states: dict[str, torch.Tensor] = {p: sample.states[p].clone() for p in scene.spec.aux}
        for state in states.values():
            state[sample.prompt_tokens :] = 0
        return states

    scene.write(empty)


def answers_of_the_next_layer(scene: Scene) -> None:
    """The decode path captured at another place than prefill."""

    def move(sample: CapturedSample) -> Mapping[str, torch.Tensor]:
        start = sample.prompt_tokens
        return {p: torch.cat([sample.states[p][:start], sample.states[later(p, 1)][start:]]) for p in scene.spec.aux}

    scene.write(move)


def behind_a_chunk(scene: Scene) -> None:
    """From two thirds of the longest sample on, the slots hold rows of other tokens: a chunk's end."""
    start = max(len(s.input_ids) for s in scene.captured.samples) * 2 // 3

    def turn(sample: CapturedSample) -> Mapping[str, torch.Tensor]:
        return {p: torch.cat([s[:start], s[start:].flip(0)]) for p, s in sample.states.items() if p in scene.spec.aux}

    scene.write(turn)


def some_rows(share: float, change: Callable[[Scene, CapturedSample, CapturePoint], torch.Tensor]) -> Planted:
    """That share of the rows of each sample, chosen at random, from what `change` makes of a slot's state."""

    def plant(scene: Scene) -> None:
        generator = torch.Generator().manual_seed(1)

        def spoil(sample: CapturedSample) -> Mapping[str, torch.Tensor]:
            chosen = torch.rand(len(sample.input_ids), generator=generator) < share
            return {p: torch.where(chosen[:, None], change(scene, sample, p), sample.states[p]) for p in scene.spec.aux}

        scene.write(spoil)

    return plant


def zeros(_scene: Scene, sample: CapturedSample, point: CapturePoint) -> torch.Tensor:
    return torch.zeros_like(sample.states[point])


def next_layer(_scene: Scene, sample: CapturedSample, point: CapturePoint) -> torch.Tensor:
    return sample.states[later(point, 1)]


def other_tokens(_scene: Scene, sample: CapturedSample, point: CapturePoint) -> torch.Tensor:
    return sample.states[point].roll(5, 0)


def next_layer_and_late(scene: Scene) -> None:
    scene.write(lambda s: {p: s.states[later(p, 1)].roll(1, 0) for p in scene.spec.aux})


def last_chunk_only(scene: Scene) -> None:
    """Chunked prefill kept the last chunk: its rows stand in the place of the earlier ones as well."""

    def repeat(sample: CapturedSample) -> Mapping[str, torch.Tensor]:
        half = len(sample.input_ids) // 2
        return {
            p: torch.cat([s[half : 2 * half], s[half:]]) for p, s in sample.states.items() if p in scene.spec.points
        }

    scene.write(repeat)


def rows_of_another_request(scene: Scene, *, aux_only: bool = False) -> None:
    last = scene.captured.samples[-1]
    points = scene.spec.aux if aux_only else scene.spec.points

    def exchange(sample: CapturedSample) -> Mapping[str, torch.Tensor]:
        if sample.id != scene.victim:
            return {}
        return {p: last.states[p][: len(sample.input_ids)] for p in points}

    scene.write(exchange)


def wrong_gather(scene: Scene) -> None:
    """Two ranks, and the gather brought the first one's half twice."""

    def gather(state: torch.Tensor) -> torch.Tensor:
        half = state.shape[-1] // 2
        return torch.cat([state[:, :half], state[:, :half]], dim=-1)

    scene.write(lambda s: {p: gather(s.states[p]) for p in scene.spec.points})


def not_finite(value: float) -> Callable[[Scene], None]:
    def plant(scene: Scene) -> None:
        def spoil(sample: CapturedSample) -> Mapping[str, torch.Tensor]:
            if sample.id != scene.victim:
                return {}
            state = sample.states[scene.mid].clone()
            state[2, 1] = value
            return {scene.mid: state}

        scene.write(spoil)

    return plant


def shard_of(scene: Scene) -> Path:
    return scene.folder / DumpReader.open(scene.folder).manifest.shards[-1].name


def truncated(scene: Scene) -> None:
    scene.write()
    path = shard_of(scene)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(scene: Scene) -> None:
    scene.write()
    flip_bit(shard_of(scene), at=0.9)


def file_lost(scene: Scene) -> None:
    scene.write()
    shard_of(scene).unlink()


def rewritten(name: Callable[[Scene], str], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Scene], None]:
    """A tensor of a shard that was changed after the capture, with sizes and digests that fit."""

    def plant(scene: Scene) -> None:
        scene.write()
        path = shard_of(scene)
        tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
        tensors[name(scene)] = change(tensors[name(scene)])
        save_file(tensors, path)
        reseal(scene.folder)

    return plant


def samples_exchanged(scene: Scene) -> None:
    """Data-parallel workers wrote in turns, and rows were numbered as if one had: names and samples part."""
    scene.write()
    records = list(DumpReader.open(scene.folder).records)
    first, second = records[0], records[1]
    records[:2] = [first.model_copy(update={"id": second.id}), second.model_copy(update={"id": first.id})]
    reseal(scene.folder, records)


def sample_left_out(scene: Scene) -> None:
    whole = write_dump(scene.captured, scene.folder.with_name("whole"), spec=scene.spec, dtype=scene.dtype)
    part = replace(scene, captured=replace(scene.captured, samples=scene.captured.samples[:-1]))
    part.write()
    reseal(scene.folder, content_digest=whole.content_digest)


def id_outside(scene: Scene) -> None:
    vocabulary = scene.captured.identity.vocab_size
    scene.write(alter=lambda s: replace(s, last_token_id=vocabulary) if s.id == scene.victim else s)


def answers_of_one_token(scene: Scene) -> None:
    def cut(sample: CapturedSample) -> CapturedSample:
        rows = sample.prompt_tokens
        last = int(sample.input_ids[rows]) if len(sample.input_ids) > rows else sample.last_token_id
        return replace(
            sample,
            input_ids=sample.input_ids[:rows],
            last_token_id=last,
            output_tokens=1,
            states={p: state[:rows] for p, state in sample.states.items()},
        )

    scene.write(alter=cut)


def other_weights(scene: Scene) -> None:
    """The states of another revision, under the name of this one."""
    assert scene.other is not None
    replace(scene, captured=replace(scene.captured, samples=scene.other.samples)).write()
