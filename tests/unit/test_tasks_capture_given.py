"""An extraction of given conversations around a stand-in server: each is read once, none is answered."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.dump.answers import read_answers
from eagle3.prompts import GivenAnswers, TokenizedPrompt
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang.client import SglangClient, SglangError
from tasks.capture_run import Bounds, CaptureRun
from tasks.capture_session import Session
from tasks.journal import ShardDone
from tasks.params import AnswerParams, ExtractParams, ServingParams
from tasks.resume import Extraction, begin
from tests.tap_stand_in import StandIn, stand_in
from tests.targets import HIDDEN, LAYERS

pytestmark = pytest.mark.unit

SPEC = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5)))
PARAMS = ExtractParams(
    name="given", capture=SPEC, answers=AnswerParams(source="given"), serving=ServingParams(streams=2)
)


def conversation(number: int) -> TokenizedPrompt:
    start, end = 4 + number, 20 + 2 * number
    spans = ((start, start + 3), (end - 5, end))
    given = GivenAnswers(
        output_ids=tuple(range(100, 100 + end - start)),
        spans=spans,
        texts=(f"first of {number}", "second"),
        finish_reason="length" if number == 3 else "given",
        left_out=2 if number == 3 else 0,
    )
    return TokenizedPrompt(f"c{number}", tuple(range(start)), None, given)


CONVERSATIONS = tuple(conversation(number) for number in range(6))


class Progress:
    def begin(self, note: str, total: float | None = None) -> None: ...

    def note(self, text: str) -> None: ...

    def at(self, done: float) -> None: ...

    def advance(self) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[StandIn, str]]:
    (tmp_path / "tap").mkdir()
    with stand_in(tmp_path / "tap", HIDDEN) as started:
        yield started


def capture(tmp_path: Path, target: Target, server: StandIn, url: str) -> tuple[Extraction, list[ShardDone]]:
    settings = Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())
    extraction = begin(PARAMS, {"asked": "the same"}, settings, lambda _: None)
    ids = ids_of(SPEC.aux, engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", num_layers=LAYERS)
    bounds = Bounds.of(2**30, shard_bytes=2**20, prompts=CONVERSATIONS, most=96, row_bytes=4 * HIDDEN * 4 + 9)
    with SglangClient(url) as client:
        session = Session(PARAMS, target, ids, server.staging, client, name=extraction.tag)
        run = CaptureRun(session, extraction, CONVERSATIONS, "given", tmp_path, Progress(), bounds)  # type: ignore[arg-type]
        return extraction, run.run()


def test_each_conversation_is_read_once_and_kept_with_its_answers(
    tiny_llama: Path, tmp_path: Path, server: tuple[StandIn, str]
) -> None:
    extraction, done = capture(tmp_path, Target.open(tiny_llama), *server)
    assert len(server[0].asked) == len(CONVERSATIONS)
    [shard] = done
    for record in shard.records:
        given = CONVERSATIONS[int(record.id[1:])].given
        assert given is not None
        assert (record.spans, record.finish_reason, record.left_out) == (
            given.spans,
            given.finish_reason,
            given.left_out,
        )
        assert record.rows == record.prompt_tokens + len(given.output_ids) - 1
    kept = {answers.id: answers for answers in read_answers(Path(extraction.uri.removeprefix("file://")), shard.shard)}
    assert [answer.text for answer in kept["c2"].answers] == ["first of 2", "second"]
    assert [answers.id for answers in kept.values() if answers.cut] == ["c3"]


def test_rows_that_were_read_before_a_stop_are_not_read_again(
    tiny_llama: Path, tmp_path: Path, server: tuple[StandIn, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.resume.PATIENCE_SECONDS", 0.05)
    stand, url = server

    def stop(_rid: str) -> None:
        if len(stand.asked) >= 5:
            raise RuntimeError("the server is gone")

    stand.before = stop
    with pytest.raises(SglangError, match="request cap-"):
        capture(tmp_path, Target.open(tiny_llama), stand, url)
    staged = len(list(stand.staging.glob("cap-*.safetensors")))
    assert staged >= 3
    stand.before, stand.asked = lambda rid: None, []
    _, done = capture(tmp_path, Target.open(tiny_llama), stand, url)
    assert len(stand.asked) == len(CONVERSATIONS) - staged
    assert {record.id for shard in done for record in shard.records} == {prompt.id for prompt in CONVERSATIONS}
