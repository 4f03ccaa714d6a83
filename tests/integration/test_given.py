"""Given conversations on a real server: what it reads is what was given, and its rows are the target's own."""

import json
from pathlib import Path

import pytest
import torch

from eagle3.conversations import GivenSettings, tokenize_given
from eagle3.dump.answers import read_answers
from eagle3.dump.manifest import Generation
from eagle3.dump.reader import DumpReader
from eagle3.evidence.head import FinalStateParts
from eagle3.evidence.references import TargetReference
from eagle3.evidence.validate import validate_dump
from eagle3.prompts import load_prompts
from eagle3.target import Target
from infra.sglang.client import GenerateRequest
from infra.sglang.server import SglangServer
from tasks.capture_session import Session, check_server
from tasks.params import ExtractParams
from tests.dumps import Capture, identity_of, unpassed, write_dump
from tests.integration.conftest import capture_ids

pytestmark = pytest.mark.integration


def write_conversations(file: Path) -> Path:
    lines = []
    for n in range(6):
        answer = f"<think>Tom has {n}.</think>The sum is {n}."
        said = [f"Tom has {n} apples.", answer, "And buys 4 more?", f"Hello world! {n} apples. " * (1 + n)]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        lines.append(json.dumps({"id": f"c{n}", "messages": messages}) + "\n")
    file.write_text("".join(lines))
    return file


def test_rows_of_given_conversations_are_the_targets_own(
    llama_server: SglangServer, llama_staging: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    target, settings = Target.open(tiny_llama), GivenSettings(thinking="mask", max_tokens=110, too_long="cut")
    loaded = load_prompts(write_conversations(tmp_path / "c.jsonl"), given=True)
    conversations = tokenize_given(loaded.prompts, target.tokenizer(), settings, context_length=target.context_length)
    params = ExtractParams.model_validate({"capture": {"aux": ["layers.1", "layers.3", "layers.5"]}})
    ids = capture_ids("LlamaForCausalLM")
    assert check_server(llama_server.client.server_info(), ids, "given") == "given"
    session = Session(params, target, ids, llama_staging, llama_server.client)
    samples = []
    for number, conversation in enumerate(conversations):
        given = conversation.given
        assert given is not None
        rid = session.rid("cap", number)
        read = (*conversation.input_ids, *given.output_ids[:-1])
        llama_server.client.answer(GenerateRequest(rid=rid, input_ids=read, max_new_tokens=1, tap=True))
        samples.append(session.sample(conversation, rid, given))
    captured = Capture(tiny_llama, identity_of(tiny_llama), tuple(samples), FinalStateParts.of(target), 1)
    generation = Generation(source="given", max_new_tokens=None, given=settings)
    write_dump(captured, tmp_path / "dump", generation=generation, probe=False)

    reader = DumpReader.open(tmp_path / "dump")
    model = target.load_model(torch.float32)
    for sample, conversation in zip(reader, conversations, strict=True):
        states = target.hidden_states(model, sample.input_ids)
        for point, rows in sample.states.items():
            torch.testing.assert_close(rows, states[point].float(), rtol=1e-3, atol=1e-3)
        assert conversation.given is not None
        assert sample.record.answer_spans == conversation.given.spans
    assert 0 < reader.manifest.num_cut < 6
    texts = [
        [answer.text for answer in kept.answers]
        for shard in reader.manifest.shards
        for kept in read_answers(reader.folder, shard)
    ]
    assert all("think" not in text and "Tom" not in text for answers in texts for text in answers)
    # The target's words are random, so its likelihoods cannot decide on given text, and that is said.
    report = validate_dump(reader, captured.parts, reference=TargetReference(target))
    assert unpassed(report) <= {"final_state", "probe"}
    assert {check.verdict for check in report.checks} <= {"pass", "warn"}
