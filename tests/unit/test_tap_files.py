"""Behind the scheduler: work in order and bounded, files in parts, answers that wait for their file and no longer."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from infra.sglang import tap as tap_module
from infra.sglang.staging import events, read_staged
from infra.sglang.tap import Tap
from infra.sglang.tap_files import Line, write_safetensors

pytestmark = pytest.mark.unit

WIDTH = 8


def test_work_is_done_in_order_and_its_giver_waits_where_too_much_is_waiting() -> None:
    line, go, done = Line("test", most_bytes=100), threading.Event(), list[int]()
    line.put(go.wait, 80)
    line.put(lambda: done.append(1), 20)
    blocked = threading.Thread(target=lambda: line.put(lambda: done.append(2), 20))
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    go.set()
    blocked.join(5)
    assert not blocked.is_alive()
    line.put(lambda: done.append(3), 1000).result(5)  # whatever its size, where nothing else waits
    assert done == [1, 2, 3]


def test_a_file_written_in_parts_is_the_joined_one(tmp_path: Path) -> None:
    parts = [torch.randn(rows, 3).to(torch.bfloat16) for rows in (1, 4, 2)]
    wide = torch.randn(7, 6)[:, :4]  # not contiguous
    ids = torch.arange(7)
    write_safetensors(tmp_path / "f", {"ids": [ids], "wide": [wide], "states": parts}, {"rid": "r-1"})
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert file.metadata() == {"rid": "r-1"}
        assert torch.equal(file.get_tensor("ids"), ids)
        assert torch.equal(file.get_tensor("wide"), wide)
        assert torch.equal(file.get_tensor("states"), torch.cat(parts))


class Scheduler:
    """A tap, the hooks in the order of SGLang's turns, and the answers that left."""

    def __init__(self, folder: Path) -> None:
        self.tap = Tap(folder)
        self.tap._announced = True  # there is no live model
        self.sent: list[str] = []
        self.go = threading.Event()

    def hold_writer(self) -> None:
        self.tap._files.put(self.go.wait)

    def prefill(self, *reqs: Any) -> None:
        lengths = [len(req.origin_input_ids) for req in reqs]
        batch = SimpleNamespace(
            rids=[req.rid for req in reqs],
            extend_seq_lens_cpu=lengths,
            batch_size=len(reqs),
            positions=torch.cat([torch.arange(length) for length in lengths]),
            forward_mode=SimpleNamespace(
                is_target_verify=lambda: False, is_decode=lambda: False, is_extend=lambda: True
            ),
        )
        runner = SimpleNamespace(is_draft_worker=False, server_args=SimpleNamespace(speculative_eagle_topk=None))
        self.tap.on_batch_built(batch, None, SimpleNamespace(reqs=list(reqs)), runner)
        ids = torch.tensor([token for req in reqs for token in req.origin_input_ids])
        states = ids[:, None].float().expand(-1, WIDTH).clone()
        self.tap.on_states(None, ids, -states, None, batch, aux_hidden_states=[states, states + 1])

    def stream_output(self, reqs: list[Any], return_logprob: bool = False, skip_req: Any = None) -> None:
        changed = self.tap.on_answer(self, reqs, return_logprob, skip_req)
        for req in changed[0][1] if changed else reqs:
            req.finished_output = req.finished()
            self.sent.append(req.rid)


def request(rid: str, length: int, *, tap: bool = True) -> Any:
    params = {"custom_params": {"tap": tap}, "n": 1, "beam_width": None, "max_new_tokens": 1}
    req = SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(**params),
        origin_input_ids=list(range(3, 3 + length)),
        output_ids=[7],
        finished_len=1,
        finished_output=False,
        finished_reason=SimpleNamespace(to_json=lambda: {"type": "length"}),
        is_finished=True,
    )
    req.finished = lambda: req.is_finished
    return req


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(tap_module, "is_writer", lambda: True)
    return Scheduler(tmp_path)


def test_a_last_answer_waits_for_its_file_while_others_leave(scheduler: Scheduler, tmp_path: Path) -> None:
    asked, silent, running = request("asked", 4), request("silent", 3, tap=False), request("running", 5)
    running.is_finished = False
    scheduler.prefill(asked, silent, running)
    scheduler.hold_writer()
    slept = []
    for _ in range(3):  # under overlap scheduling a finished request passes again
        scheduler.stream_output([asked, silent, running])
        scheduler.tap.release()
        scheduler.tap.doze(lambda: slept.append(True))
    assert scheduler.sent == ["silent", "running"] * 3
    assert not slept, "a held answer must not wait for the next request"
    assert not list(tmp_path.glob("*.safetensors"))
    scheduler.go.set()
    while "asked" not in scheduler.sent:
        scheduler.tap.doze(lambda: slept.append(True))
        scheduler.tap.release()
    assert scheduler.sent.count("asked") == 1
    rows = read_staged(tmp_path / "asked.safetensors", num_slots=2, hidden_size=WIDTH)
    assert rows.aux[1][:, 0].tolist() == [4, 5, 6, 7]
    assert rows.final[:, 0].tolist() == [-3, -4, -5, -6]
    scheduler.tap.doze(lambda: slept.append(True))
    assert slept == [True]


def test_an_answer_whose_file_cannot_be_written_leaves_without_it(scheduler: Scheduler, tmp_path: Path) -> None:
    asked = request("asked", 4)
    scheduler.prefill(asked)
    (tmp_path / f"asked.safetensors.{os.getpid()}.tmp").mkdir()
    scheduler.stream_output([asked])
    while not scheduler.sent:
        scheduler.tap.doze(lambda: None)
        scheduler.tap.release()
    (event,) = events(tmp_path)
    assert (event["event"], event["where"]) == ("error", "write")


def test_a_request_waits_for_the_file_of_an_earlier_one_with_its_rid(scheduler: Scheduler, tmp_path: Path) -> None:
    """The earlier one's client has left, or the rid would not be free: its file must not come after the next began."""
    scheduler.prefill(earlier := request("again", 4))
    scheduler.hold_writer()
    scheduler.stream_output([earlier])
    threading.Timer(0.2, scheduler.go.set).start()
    scheduler.prefill(request("again", 6))
    assert scheduler.go.is_set()
    assert not list(tmp_path.glob("*.safetensors"))
