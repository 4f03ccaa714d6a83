"""A stand-in for SGLang with the tap, for tests of what surrounds it: it answers and stages rows, in milliseconds.

Its states are made up, the same for the same tokens; everything real of an extraction is tested with the real server.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.conventions import EngineIds
from eagle3.target import Target

NUM_SLOTS = 3
VERSION = "0.5.23"


class StandIn:
    """Answers `/generate` with tokens that follow from the prompt; a request that asks for its rows has them staged."""

    def __init__(self, staging: Path, hidden_size: int) -> None:
        self.staging, self.hidden_size = staging, hidden_size
        self.asked: list[str] = []  # rids, in order
        self.in_flight = self.most_in_flight = 0
        self.seconds = 0.0
        self.before: Callable[[str], None] = lambda rid: None
        self.said: dict[str, Any] = {}  # by path
        self._lock = threading.Lock()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        rid, prompt, params = body["rid"], body["input_ids"], body["sampling_params"]
        with self._lock:
            self.asked.append(rid)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self.before(rid)
            time.sleep(self.seconds)
            output = [(sum(prompt) + 7 * step) % 500 for step in range(params["max_new_tokens"])]
            if params.get("custom_params", {}).get("tap"):
                self.stage(rid, prompt, output)
        finally:
            with self._lock:
                self.in_flight -= 1
        meta = {
            "id": rid,
            "finish_reason": {"type": "length"},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output),
            "e2e_latency": 0.01,
        }
        return {"output_ids": output, "text": " ".join(map(str, output)), "meta_info": meta}

    def present(self, target: Target, ids: EngineIds) -> None:
        """Say of itself what a server of this target would, so that an extraction attaches to it; it has no probe."""
        path = str(target.path)
        self.said["/model_info"] = {"model_path": path}
        self.said["/server_info"] = {
            "version": VERSION,
            "model_path": path,
            "disable_radix_cache": True,
            "enable_return_aux_hidden_states": True,
            "return_aux_hidden_state_layer_ids": ids.ids,
            "aux_hidden_state_capture": "eagle3",
            "return_hidden_states_mode": "full",
            "cuda_graph_backend_decode": "disabled",
        }
        live = {
            "tap_version": "stand-in",
            "sglang_version": VERSION,
            "model_class": target.model_class,
            "inner_class": target.model_class,
            "layers_to_capture": [i + 1 for i in ids.ids],
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "dtype": "float32",
            "device": "cpu",
            "decode_graphs": False,
            "prefill_graphs": False,
            "missing_hooks": [],
        }
        (self.staging / "live.0.json").write_text(json.dumps(live))

    def stage(self, rid: str, prompt: list[int], output: list[int]) -> None:
        ids = torch.tensor([*prompt, *output[:-1]])
        ramp = torch.arange(self.hidden_size, dtype=torch.float32)
        state = ids[:, None].float() + ramp
        metadata = {
            "rid": rid,
            "prompt_tokens": len(prompt),
            "output_tokens": len(output),
            "rows": len(ids),
            "last_token_id": output[-1],
            "finish": json.dumps({"type": "length"}),
        }
        tensors = {
            "aux_hidden_states": torch.cat([state * (slot + 1) for slot in range(NUM_SLOTS)], dim=1),
            "final_hidden_state": -state,
            "input_ids": ids,
        }
        path = self.staging / f"{rid}.safetensors"
        temporary = path.with_name(f"{path.name}.1.tmp")
        save_file(tensors, temporary, {key: str(value) for key, value in metadata.items()})
        temporary.replace(path)


@contextmanager
def stand_in(staging: Path, hidden_size: int) -> Iterator[tuple[StandIn, str]]:
    """A running stand-in and its URL."""
    server = StandIn(staging, hidden_size)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            self._answer(server.generate(body) if self.path == "/generate" else {})

        def do_GET(self) -> None:
            self._answer(server.said.get(self.path, {}))

        def _answer(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
