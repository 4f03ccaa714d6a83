"""One extraction on one running server: its own words are checked, then every prompt is answered and captured."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle3.conventions import EngineIds
from eagle3.conventions.sglang import live_points
from eagle3.dump.manifest import LiveCapture, ShardEntry
from eagle3.errors import Eagle3Error
from eagle3.prompts import TokenizedPrompt
from infra.store import Store
from tasks.params import ExtractParams
from tasks.probe import judge_probe, take_probe
from tasks.progress import StageProgress

if TYPE_CHECKING:
    from eagle3.dump.probe import Probe
    from eagle3.dump.writer import CapturedSample, DumpFiles, DumpWriter
    from eagle3.target import Target
    from infra.sglang.client import Generated, SglangClient
    from infra.sglang.info import ModelInfo, ServerInfo
    from infra.sglang.staging import LiveModel

Source = Literal["while_answering", "answer_then_prefill"]


class CaptureRefused(Eagle3Error):
    """The server would deliver other states than the ones asked for, or not all of them."""


def check_server(info: "ServerInfo", ids: EngineIds, wanted: Literal["auto"] | Source) -> Source:
    """The server's own answer, before the first prompt: how states may be captured; CaptureRefused where not all."""
    from infra.sglang.info import capture_problems, decode_graphs_off

    problems = capture_problems(info, ids)
    if problems:
        raise CaptureRefused("this server would not deliver every state:\n- " + "\n- ".join(problems))
    off = decode_graphs_off(info)
    if wanted == "while_answering" and not off:
        raise CaptureRefused(
            "capturing while answering needs decode graphs off: a Python hook does not run when a CUDA graph is "
            "replayed. Set serving.disable_decode_graphs, or answers.source to answer_then_prefill."
        )
    if wanted == "auto":
        return "while_answering" if off else "answer_then_prefill"
    return wanted


def check_weights(info: "ServerInfo", model: "ModelInfo", target: "Target") -> None:
    """CaptureRefused unless the server answers with the weights in the target's folder, whose digest the dump claims.

    `model` is what answers now: a server may have been given other weights since it started.
    """
    served = Path(model.model_path)
    if info.load_format == "dummy":
        raise CaptureRefused(
            f"this server loaded no weights (load_format dummy): a dump of it would claim those of {target.path}"
        )
    if not served.is_absolute() or served.resolve() != target.path.resolve():
        raise CaptureRefused(
            f"this server answers with the model {model.model_path}, and the target is {target.path}: a dump would "
            "claim the target's weights, and nobody compared them. Start the server with --model-path "
            f"{target.path} (in a container: with the folder mounted at this very path), or name the served folder as "
            "the target"
        )


def check_live(live: "LiveModel", ids: EngineIds, target: "Target", params: ExtractParams) -> LiveCapture:
    """What the tap read off the running model: its class, its shape and its capture list must be the ones asked for."""
    if target.model_class not in (live.model_class, live.inner_class):
        raise CaptureRefused(
            f"the target's config.json names {target.model_class}, SGLang runs {live.model_class} (decoder in "
            f"{live.inner_class}): layer ids of one class may mean other layers in another. Use a build of SGLang that "
            f"has {target.model_class}, or attach to the server of this target."
        )
    shape = (live.num_layers, live.hidden_size)
    if shape != (target.num_layers, target.hidden_size):
        raise CaptureRefused(
            f"the live model has {shape[0]} layers of width {shape[1]}, the target {target.num_layers} of width "
            f"{target.hidden_size}: the server serves another model"
        )
    delivered = live_points(
        live.layers_to_capture, target.num_layers, model_class=live.model_class, version=ids.version
    )
    if delivered != params.capture.aux:
        raise CaptureRefused(
            f"asked for {', '.join(params.capture.aux)} with ids {list(ids.ids)}, but the live {live.model_class} "
            f"captures {', '.join(delivered)} (layers_to_capture {list(live.layers_to_capture)}): this build of SGLang "
            "means something else by these ids"
        )
    return live.capture


@dataclass
class Session:
    """Sends prompts to a checked server and takes their rows from its staging folder."""

    params: ExtractParams
    target: "Target"
    ids: EngineIds
    staging: Path
    client: "SglangClient"
    # In every rid: an attached server may have rows of an earlier session, or of another one, in the same folder.
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def check_live_model(self, prompt: TokenizedPrompt) -> LiveCapture:
        """One request through the whole way, its rows read, before the bulk; and the tap's word on the live model."""
        from infra.sglang.staging import read_live

        rid = self._rid("check", 0)
        answers: list[Generated] = []
        self._answer([(rid, prompt.input_ids, 1, True)], answers.append)
        live = check_live(read_live(self.staging), self.ids, self.target, self.params)
        self.sample(prompt, rid, answers[0])
        return live

    def probe(self, prompts: Sequence[TokenizedPrompt]) -> "Probe":
        """Every boundary of the live model on a few sequences, before the bulk.

        CaptureRefused where a slot is another boundary than was asked for; NoProbe where the server cannot be probed.
        """
        probe = take_probe(self.client, self.staging, self.target, self.params.capture.points, prompts)
        check = judge_probe(probe, self.target)
        if check.verdict == "fail":
            raise CaptureRefused(f"before the first prompt, a probe of the running server says: {check.sentence}")
        return probe

    def capture(
        self, prompts: Sequence[TokenizedPrompt], source: Source, folder: Path, store: Store, progress: StageProgress
    ) -> "DumpFiles":
        """Every prompt answered and captured; a full shard goes to the store and leaves this disk."""
        from eagle3.dump.writer import DumpWriter

        progress.begin("answering and capturing", total=len(prompts))

        def upload(path: Path, entry: ShardEntry) -> None:
            store.put_file(entry.name, path, sha256=entry.sha256)
            path.unlink()

        writer = DumpWriter(
            folder,
            self.params.capture,
            hidden_size=self.target.hidden_size,
            shard_bytes=self.params.shard_mib * 2**20,
            on_shard=upload,
        )
        if source == "while_answering":
            self._while_answering(prompts, writer, progress)
        else:
            self._answer_then_prefill(prompts, writer, progress)
        return writer.finish()

    def sample(self, prompt: TokenizedPrompt, rid: str, answer: "Generated") -> "CapturedSample":
        """The staged rows of request `rid` as a sample of the dump; the staged file is removed.

        CaptureRefused with the tap's own reason where there are none.
        """
        from eagle3.dump.writer import CapturedSample
        from infra.sglang.staging import clear, read_staged, staged_path, why_missing

        path = staged_path(self.staging, rid)
        if not path.exists():
            raise CaptureRefused(f"prompt {prompt.id}: no rows were captured: {why_missing(self.staging, rid)}")
        rows = read_staged(path, num_slots=len(self.params.capture.aux), hidden_size=self.target.hidden_size)
        read = (*prompt.input_ids, *answer.output_ids[:-1])  # the last token is never read
        if tuple(rows.input_ids.tolist()) != read:
            raise CaptureRefused(
                f"prompt {prompt.id}: the captured rows belong to {len(rows.input_ids)} tokens that are not its prompt "
                f"and answer ({len(read)} tokens were read): the states would be those of another text"
            )
        sample = CapturedSample(
            id=prompt.id,
            input_ids=rows.input_ids,
            last_token_id=answer.output_ids[-1],
            prompt_tokens=len(prompt.input_ids),
            output_tokens=len(answer.output_ids),
            finish_reason=answer.finish_reason,
            states=dict(zip(self.params.capture.points, (*rows.aux, rows.final), strict=True)),
        )
        clear(self.staging, rid)
        return sample

    def _while_answering(
        self, prompts: Sequence[TokenizedPrompt], writer: "DumpWriter", progress: StageProgress
    ) -> None:
        by_rid = {self._rid("cap", n): prompt for n, prompt in enumerate(prompts)}

        def take(answer: "Generated") -> None:
            writer.add(self.sample(by_rid[answer.rid], answer.rid, answer))
            progress.advance()

        most = self.params.answers.max_new_tokens
        self._answer([(rid, prompt.input_ids, most, True) for rid, prompt in by_rid.items()], take)

    def _answer_then_prefill(
        self, prompts: Sequence[TokenizedPrompt], writer: "DumpWriter", progress: StageProgress
    ) -> None:
        """Two passes: answers with decode graphs on; then prompt + answer read once, whose rows are prefill's."""
        numbers = {self._rid("ans", n): n for n in range(len(prompts))}
        answers: dict[int, Generated] = {}

        def keep(answer: "Generated") -> None:
            answers[numbers[answer.rid]] = answer
            progress.advance(0.5)

        most = self.params.answers.max_new_tokens
        self._answer([(rid, prompts[n].input_ids, most, False) for rid, n in numbers.items()], keep)
        prefills = {self._rid("cap", n): n for n in range(len(prompts))}

        def take(prefilled: "Generated") -> None:
            number = prefills[prefilled.rid]
            writer.add(self.sample(prompts[number], prefilled.rid, answers[number]))
            progress.advance(0.5)

        texts = [(rid, (*prompts[n].input_ids, *answers[n].output_ids[:-1]), 1, True) for rid, n in prefills.items()]
        self._answer(texts, take)

    def _rid(self, kind: str, number: int) -> str:
        return f"{kind}-{self.name}-{number:06d}"

    def _answer(
        self, requests: Sequence[tuple[str, Sequence[int], int, bool]], on_done: "Callable[[Generated], None]"
    ) -> None:
        """Send requests (rid, input ids, most new tokens, tapped); `on_done` runs in this thread, as each arrives."""
        from infra.sglang.client import GenerateRequest

        batch = [
            GenerateRequest(rid=rid, input_ids=tuple(ids), max_new_tokens=most, tap=tap)
            for rid, ids, most, tap in requests
        ]
        self.client.generate_many(batch, streams=self.params.serving.streams, on_done=on_done)
