"""The tap: a SGLang plugin that writes a request's hidden states to a staging folder, one file per request.

SGLang loads it through its own entry-point group `sglang.srt.plugins`; it does nothing unless `EAGLE3_TAP_DIR` names a
folder. It imports the standard library, torch and SGLang only, so that it also works in a foreign SGLang build
(`tap_dist/` packs this file, `tap_rows.py`, `tap_files.py` and `tap_probe.py` alone). Hook points: SGLang 0.5.23.

A request asks with `sampling_params.custom_params = {"tap": true}` and gets `<rid>.safetensors`, which is there before
the final answer leaves the server:

    aux_hidden_states   [rows, K*H]  captured layers, concatenated in the order in which the model delivers them
    final_hidden_state  [rows, H]    what the logits processor received: the state after the final norm
    input_ids           [rows]       int64

A probe asks with `{"tap": "probe"}` and one token to generate. Its file also has every boundary, seen another way
(`tap_probe.py`):

    boundaries          [rows, N+2, H]  `embed`, the outputs of layers 0 ... N-1, `norm`

Row i is the state after reading token i; rows = prompt + output - 1, for the last token of an answer is never read.
Every other outcome is a line in `events.<pid>.jsonl` that names the request and says why. `live.<pid>.json` tells what
the running model itself captures. What was captured hangs on SGLang's own request object and dies with it.

The scheduler's thread copies and writes nothing: it takes hold of a pass's tensors, and two threads behind it give the
rows to their requests and write the files. A finished request's last answer is held back until its file is there, while
other requests go on. Both threads are bounded in the memory that waits for them: behind a slow disk the server waits.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from pathlib import Path
from typing import Any

from .tap_files import Held, Line, publish, write_safetensors
from .tap_probe import Walk, check_parallel, decoder_of
from .tap_rows import Capture, Pass, collect, mark, mark_of, spans_of

TAP_VERSION = "1.2.0"
ENV_DIR = "EAGLE3_TAP_DIR"

# (method of Tap, kind of hook, what it is hooked to in sglang.srt)
_HOOKS = (
    ("announce", "AFTER", "model_executor.model_runner.ModelRunner.init_cuda_graphs"),
    ("on_batch_built", "AFTER", "model_executor.forward_batch_info.ForwardBatch.init_new"),
    ("on_states", "BEFORE", "layers.logits_processor.LogitsProcessor.forward"),
    ("on_answer", "BEFORE", "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"),
    ("on_abort", "AFTER", "managers.scheduler.Scheduler.send_abort_output"),
    ("release", "AFTER", "managers.scheduler.Scheduler.process_input_requests"),
    ("doze", "AROUND", "managers.scheduler.Scheduler.maybe_sleep_on_idle"),
)
_STATES_ARGUMENTS = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")
# Rids come from clients: only these become file names.
_SAFE_RID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_ATTRIBUTE = "_eagle3_tap"
_UNSEEN = object()
_MOST_WAITING = 2**30  # bytes of rows that may wait for each of the two threads
_DOZE_SECONDS = 0.02

_log = logging.getLogger("eagle3.tap")


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the tap that never raises: an exception in a hook kills the scheduler. It becomes an event."""

    @wraps(method)
    def run(tap: "Tap", subject: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(tap, subject, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see above
            why = f"{type(error).__name__}: {error}"
            tap.event("error", str(getattr(subject, "rid", "-")), why=why, where=method.__name__)
            return None

    return run


class Tap:
    """What the hooks do, one per process. Each takes what it is hooked to takes; AFTER hooks take its result first.

    A capture is written in the thread of `_copies` only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events = folder / f"events.{os.getpid()}.jsonl"
        self._announced = False
        self._walk: Walk | None = None
        self._copies = Line("eagle3-tap-copy", _MOST_WAITING)
        self._files = Line("eagle3-tap-write", _MOST_WAITING)
        self._held: dict[int, Held] = {}  # by the request's identity, in the order in which they finished

    @_guarded
    def announce(self, _result: Any, runner: Any, *_: Any, **__: Any) -> None:
        """When the model is ready to serve: write `live.<pid>.json`, for the target, on a rank that writes."""
        if self._announced or runner.is_draft_worker or not is_writer():
            return
        self._announced = True
        text = json.dumps(describe(runner), indent=1)
        publish(self.folder / f"live.{os.getpid()}.json", lambda path: path.write_text(text))

    @_guarded
    def on_batch_built(self, forward_batch: Any, _cls: Any, batch: Any, model_runner: Any, *_: Any, **__: Any) -> None:
        """Mark on the forward batch which of its requests are captured."""
        self.announce(None, model_runner)
        if model_runner.is_draft_worker:
            return
        captures: list[tuple[int, Capture]] = []
        for index, req in enumerate(batch.reqs):
            capture: Any = getattr(req, _ATTRIBUTE, _UNSEEN)
            if capture is _UNSEEN:
                capture = self._begin(req, model_runner.server_args)
                setattr(req, _ATTRIBUTE, capture)
            if capture is not None and capture.failure is None:
                captures.append((index, capture))
        walk = self._look(forward_batch, batch.reqs, model_runner, captures)
        if captures or walk:
            mark(forward_batch, captures, walk)

    def _look(self, forward_batch: Any, reqs: Any, runner: Any, captures: list[tuple[int, Capture]]) -> Walk | None:
        """Look at every boundary of this pass where a probe is in it: on every rank, whatever this one keeps."""
        if self._walk:  # of a pass that never came to the logits
            self._walk.end()
            self._walk = None
        if not any(wants_probe(req) and not why_refused(req, runner.server_args) for req in reqs):
            return None
        probes = [(index, capture) for index, capture in captures if capture.probe]
        try:
            check_parallel()
            layers, norm = decoder_of(
                runner.model, capture_list(runner.model)[0], runner.model_config.num_hidden_layers
            )
            spans = spans_of(forward_batch)
            self._walk = Walk(
                layers,
                norm,
                hidden_size=runner.model_config.hidden_size,
                num_tokens=spans[-1][1],
                spans={index: spans[index] for index, _ in probes},
            )
        except Exception as error:  # noqa: BLE001 - the other requests of the batch keep their rows
            self._fail(probes, f"no probe: {error}")
        return self._walk

    def _fail(self, captures: list[tuple[int, Capture]], why: str) -> None:
        for _, capture in captures:
            self._copies.put(partial(capture.fail, why))

    @_guarded
    def _begin(self, req: Any, server_args: Any) -> Capture | None:
        if not asks(req) or not is_writer():
            return None
        refusal = why_refused(req, server_args)
        if refusal:
            self.event("refused", req.rid, why=refusal)
            return None
        # The file of an earlier request with this rid must never pass for this one's.
        for held in self._held.values():
            if held.req.rid == req.rid:  # its client has left
                held.wait()
        self._file(req.rid).unlink(missing_ok=True)
        return Capture(probe=wants_probe(req))

    @_guarded
    def on_states(self, _processor: Any, *args: Any, **named: Any) -> None:
        """Take the rows of the marked requests; SGLang's models pass some arguments by name."""
        given = dict(zip(_STATES_ARGUMENTS, args, strict=False)) | named
        marked = mark_of(given["logits_metadata"])
        if marked is None:
            return
        captures, walk = marked.captures, marked.walk
        try:
            if walk:
                walk.end()
            if captures:
                rows = collect(captures, walk=walk, **given)
                self._copies.put(partial(self._keep, rows), rows.num_bytes)
        except Exception as error:  # noqa: BLE001 - the requests of this batch have lost rows
            self._fail(captures, f"{type(error).__name__}: {error}")

    def _keep(self, rows: Pass) -> None:
        try:
            rows.keep()
        except Exception as error:  # noqa: BLE001 - see above
            for _, capture in rows.captures:
                capture.fail(f"{type(error).__name__}: {error}")

    @_guarded
    def on_answer(
        self, streamer: Any, reqs: Any, return_logprob: bool = False, skip_req: Any = None, **more: Any
    ) -> Any:
        """A request passes here finished exactly once, before its final answer leaves: that one is held back.

        Under overlap scheduling a held request may pass again.
        """
        for req in reqs:
            if req is not skip_req and req.finished() and not req.finished_output and id(req) not in self._held:
                work = self.finish(req)
                if work is not None:
                    send = partial(streamer.stream_output, [req], return_logprob)
                    self._held[id(req)] = Held(req, work, send)
        if not self._held:
            return None
        staying = [req for req in reqs if id(req) not in self._held]
        return (streamer, staying, return_logprob, skip_req), more

    def release(self, *_: Any, **__: Any) -> None:
        """Once in every turn of the scheduler: answers whose files are there leave."""
        for held in [held for held in self._held.values() if held.is_over()]:
            del self._held[id(held.req)]
            held.send()

    def doze(self, sleep: Callable[..., None], *args: Any, **named: Any) -> None:
        """Around the sleep of an idle scheduler, which only a new request ends: a held answer must end it too."""
        if not self._held:
            sleep(*args, **named)
            return
        next(iter(self._held.values())).wait(_DOZE_SECONDS)

    @_guarded
    def on_abort(self, _result: Any, _scheduler: Any, abort_req: Any, req: Any) -> None:
        """A request that ends outside the stream of answers: in the queue, in chunked prefill, by retraction."""
        self._end_aborted(req, abort_req.finished_reason)

    @_guarded
    def finish(self, req: Any) -> "Future[Future[None] | None] | None":
        """Have the request's file published, or the reason told why not; None where nothing is to be waited for."""
        reason = req.finished_reason.to_json()
        if reason.get("type") == "abort":
            self._end_aborted(req, reason)
            return None
        capture = self._take(req)
        if capture is None:
            return None
        output = list(req.output_ids[: req.finished_len])  # a stop may leave tokens behind it
        return self._copies.put(partial(self.complete, req, list(req.origin_input_ids), output, reason, capture))

    @_guarded
    def complete(
        self, req: Any, prompt: list[int], output: list[int], reason: dict[str, Any], capture: Capture
    ) -> "Future[None] | None":
        """Behind the last rows of a request: check them and give them to the writer."""
        rows = len(prompt) + len(output) - 1
        if capture.failure or not output or capture.rows < rows:
            self.event("incomplete", req.rid, why=capture.failure or f"{capture.rows} rows captured instead of {rows}")
            return None
        capture.rewind(rows)
        tensors = capture.tensors()
        if tensors["input_ids"][0].tolist() != (prompt + output)[:-1]:
            self.event("ids_mismatch", req.rid, why="the captured token ids are not those of prompt and answer")
            return None
        numbers = {
            "prompt_tokens": len(prompt),
            "output_tokens": len(output),
            "rows": rows,
            "last_token_id": output[-1],
        }
        metadata = {name: str(value) for name, value in numbers.items()}
        metadata |= {"rid": req.rid, "finish": json.dumps(reason), "tap_version": TAP_VERSION}
        return self._files.put(partial(self.write, req, tensors, metadata), capture.num_bytes)

    @_guarded
    def write(self, req: Any, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        publish(self._file(req.rid), lambda path: write_safetensors(path, tensors, metadata))
        self.event("published", req.rid, rows=int(metadata["rows"]))

    def _end_aborted(self, req: Any, reason: Any) -> None:
        capture = self._take(req)
        if capture is not None:
            why = reason.get("message") if isinstance(reason, dict) else None
            self._copies.put(partial(self._tell_aborted, req.rid, why or "aborted by the client", capture))

    def _tell_aborted(self, rid: str, why: str, capture: Capture) -> None:
        self.event("aborted", rid, why=why, rows=capture.rows)

    def _take(self, req: Any) -> Capture | None:
        """The request's capture, for the one that ends it: nothing is left on the request."""
        capture: Any = getattr(req, _ATTRIBUTE, _UNSEEN)
        if capture is _UNSEEN:  # it never reached a batch
            capture = Capture() if asks(req) and is_writer() else None
        setattr(req, _ATTRIBUTE, None)
        return capture

    def _file(self, rid: str) -> Path:
        return self.folder / f"{rid}.safetensors"

    def event(self, kind: str, rid: str, **more: Any) -> None:
        """Append one line to the event log. A full disk must not reach the scheduler."""
        record = {"time": time.time(), "pid": os.getpid(), "event": kind, "rid": rid[:200], **more}
        try:
            with self._events.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            _log.warning("the tap cannot write its event %s: %s", record, error)


def asks(req: Any) -> bool:
    """Whether a request wants its states: `custom_params = {"tap": true}`, or "probe"; nothing else counts."""
    params = getattr(req.sampling_params, "custom_params", None)
    return isinstance(params, dict) and (params.get("tap") is True or wants_probe(req))


def wants_probe(req: Any) -> bool:
    """Whether a request wants every boundary too: `custom_params = {"tap": "probe"}`."""
    params = getattr(req.sampling_params, "custom_params", None)
    return isinstance(params, dict) and params.get("tap") == "probe"


def why_refused(req: Any, server_args: Any) -> str | None:
    """Why a request that asks cannot be captured, None where it can."""
    if not _SAFE_RID.fullmatch(req.rid):
        return "the rid does not serve as a file name: 1 to 128 of A-Z a-z 0-9 . _ -, no dot first"
    params = req.sampling_params
    if (params.n or 1) > 1 or (params.beam_width or 1) > 1:
        return "several answers for one request (n, beam_width): ask for one"
    if (server_args.speculative_eagle_topk or 1) > 1:
        return "the server drafts trees (--speculative-eagle-topk above 1): rows of rejected branches could pass"
    if wants_probe(req) and params.max_new_tokens != 1:
        return "a probe is read, not answered: ask for one token (max_new_tokens 1)"
    return None


def is_writer() -> bool:
    """Every rank of an attention group sees the same full-width rows: one of them writes."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def describe(runner: Any) -> dict[str, Any]:
    """What the live model is and captures, read off the model itself and not off the server's flags."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_parallel

    parallel, model, config = get_parallel(), runner.model, runner.model_config
    path, layers = capture_list(model)
    eager = getattr(runner, "eager_runner", None)
    decode, prefill = (getattr(runner, f"{phase}_cuda_graph_runner", None) for phase in ("decode", "prefill"))
    return {
        "tap_version": TAP_VERSION,
        "sglang_version": sglang.__version__,
        "model_class": type(model).__name__,
        "inner_class": type(model.get_submodule(path.rpartition(".")[0])).__name__,
        "layers_to_capture": layers,
        "num_layers": int(config.num_hidden_layers),
        "hidden_size": int(config.hidden_size),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "tp_rank": parallel.tp_rank,
        "dp_rank": parallel.dp_rank,
        "decode_graphs": decode not in (None, eager),
        "prefill_graphs": prefill not in (None, eager),
        "probes": True,
        "missing_hooks": sorted({f"sglang.srt.{target}" for _, _, target in _HOOKS} - HookRegistry._patched),
    }


def capture_list(model: Any) -> tuple[str, list[int]]:
    """Where in the model the list of captured boundaries stands, and the list; ("", []) where nothing is captured.

    Wrappers delegate (Kimi-K2.5: `language_model.model`), so the module that holds a non-empty list is looked for.
    """
    found = {
        path: [int(boundary) for boundary in module.layers_to_capture]
        for path, module in model.named_modules()
        if getattr(module, "layers_to_capture", None)
    }
    if len(set(map(tuple, found.values()))) > 1:
        raise ValueError(f"several modules capture different layers: {found}")
    return next(iter(found.items()), ("", []))


def register() -> None:
    """The entry point. Without `EAGLE3_TAP_DIR` nothing is hooked; twice installed, it is hooked once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    folder = os.environ.get(ENV_DIR)
    if not folder or hasattr(HookRegistry, _ATTRIBUTE):
        return
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    tap = Tap(Path(folder).resolve())
    setattr(HookRegistry, _ATTRIBUTE, tap)
    for method, kind, target in _HOOKS:
        HookRegistry.register(f"sglang.srt.{target}", getattr(tap, method), HookType[kind])
