"""One extraction on one running server: its own words are checked, then every prompt is answered and captured."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle3.conventions import EngineIds
from eagle3.conventions.sglang import live_points
from eagle3.dump.manifest import LiveCapture
from eagle3.errors import Eagle3Error
from eagle3.prompts import GivenAnswers, TokenizedPrompt
from tasks.params import ExtractParams
from tasks.probe import judge_probe, take_probe

if TYPE_CHECKING:
    from eagle3.dump.probe import Probe
    from eagle3.dump.writer import CapturedSample
    from eagle3.target import Target
    from infra.sglang.client import Generated, SglangClient
    from infra.sglang.info import ModelInfo, ServerInfo
    from infra.sglang.staging import LiveModel

Source = Literal["while_answering", "answer_then_prefill", "given"]


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
    # In every rid: an attached server may have rows of another session in the same folder. An extraction that is
    # resumed has the name that it had.
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def check_live_model(self, prompt: TokenizedPrompt) -> LiveCapture:
        """One request through the whole way, its rows read, before the bulk; and the tap's word on the live model."""
        from infra.sglang.staging import clear, read_live

        rid = self.rid("check", 0)
        answer = self.client.generate(prompt.input_ids, rid=rid, max_new_tokens=1, tap=True)
        live = check_live(read_live(self.staging), self.ids, self.target, self.params)
        self.sample(prompt, rid, answer)
        clear(self.staging, rid)
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

    def sample(self, prompt: TokenizedPrompt, rid: str, answer: "Generated | GivenAnswers") -> "CapturedSample":
        """The staged rows of request `rid` as a sample of the dump; the staged file stays.

        CaptureRefused with the tap's own reason where there are none.
        """
        from eagle3.dump.writer import CapturedSample
        from infra.sglang.staging import read_staged, staged_path, why_missing

        path = staged_path(self.staging, rid)
        if not path.exists():
            raise CaptureRefused(f"prompt {prompt.id}: no rows were captured: {why_missing(self.staging, rid)}")
        rows = read_staged(path, num_slots=len(self.params.capture.aux), hidden_size=self.target.hidden_size)
        if isinstance(answer, GivenAnswers):
            spans, texts, left_out = answer.spans, answer.texts, answer.left_out
        else:
            spans, texts, left_out = (), (answer.text,), 0
        read = (*prompt.input_ids, *answer.output_ids[:-1])  # the last token is never read
        if tuple(rows.input_ids.tolist()) != read:
            raise CaptureRefused(
                f"prompt {prompt.id}: the captured rows belong to {len(rows.input_ids)} tokens that are not its prompt "
                f"and answer ({len(read)} tokens were read): the states would be those of another text"
            )
        return CapturedSample(
            id=prompt.id,
            input_ids=rows.input_ids,
            last_token_id=answer.output_ids[-1],
            prompt_tokens=len(prompt.input_ids),
            output_tokens=len(answer.output_ids),
            finish_reason=answer.finish_reason,
            states=dict(zip(self.params.capture.points, (*rows.aux, rows.final), strict=True)),
            spans=spans,
            texts=texts,
            left_out=left_out,
        )

    def rid(self, kind: str, number: int) -> str:
        """The name of a request, all of one width: SGLang aborts by prefix."""
        return f"{kind}-{self.name}-{number:06d}"
