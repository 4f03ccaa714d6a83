"""The tap: a SGLang plugin that writes a request's hidden states to a staging folder, one file per request.

SGLang loads it through its own entry-point group `sglang.srt.plugins`; it does nothing unless `EAGLE3_TAP_DIR` names a
folder. It imports the standard library, torch, safetensors and SGLang only, so this one file also works in a foreign
SGLang build (`tap_dist/` packs it alone). Hook points: SGLang 0.5.23.

A request asks with `sampling_params.custom_params = {"tap": true}` and gets `<rid>.safetensors`, which is there before
the final answer leaves the server:

    aux_hidden_states   [rows, K*H]  captured layers, concatenated in the order in which the model delivers them
    final_hidden_state  [rows, H]    what the logits processor received: the state after the final norm
    input_ids           [rows]       int64

Row i is the state after reading token i; rows = prompt + output - 1, for the last token of an answer is never read.
Every other outcome is a line in `events.<pid>.jsonl` that names the request and says why. `live.<pid>.json` tells what
the running model itself captures. What was captured hangs on SGLang's own request object and dies with it.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TAP_VERSION = "1.0.0"
ENV_DIR = "EAGLE3_TAP_DIR"

# (method of Tap, kind of hook, what it is hooked to in sglang.srt)
_HOOKS = (
    ("announce", "AFTER", "model_executor.model_runner.ModelRunner.init_cuda_graphs"),
    ("on_batch_built", "AFTER", "model_executor.forward_batch_info.ForwardBatch.init_new"),
    ("on_states", "BEFORE", "layers.logits_processor.LogitsProcessor.forward"),
    ("on_answer", "BEFORE", "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"),
    ("on_abort", "AFTER", "managers.scheduler.Scheduler.send_abort_output"),
)
_STATES_ARGUMENTS = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")
# Rids come from clients: only these become file names.
_SAFE_RID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_ATTRIBUTE = "_eagle3_tap"
_UNSEEN = object()

_log = logging.getLogger("eagle3.tap")


class Capture:
    """The rows of one request, in the order of their positions, in the host's memory."""

    def __init__(self) -> None:
        self.rows = 0
        self.failure: str | None = None
        self._parts: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []  # (position, ids, aux, final)

    def write(self, position: int, ids: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> None:
        """Put rows at `position` and after; what stood there is replaced (retraction, rejected drafts)."""
        if position > self.rows:
            self.fail(
                f"rows {self.rows} to {position - 1} were not computed while this request ran (a hit in the prefix "
                "cache, or a CUDA graph, which runs no hook)"
            )
            return
        self.rewind(position)
        self._parts.append((position, ids, aux, final))
        self.rows = position + len(ids)

    def rewind(self, rows: int) -> None:
        """Forget every row at position `rows` and after."""
        while self._parts and self._parts[-1][0] >= rows:
            self._parts.pop()
        if self._parts:
            position, ids, aux, final = self._parts[-1]
            keep = rows - position
            if keep < len(ids):
                self._parts[-1] = (position, ids[:keep], aux[:keep], final[:keep])
        self.rows = min(self.rows, rows)

    def fail(self, why: str) -> None:
        """This request cannot be published any more: the first reason is kept, the rows are let go."""
        self.failure = self.failure or why
        self.rewind(0)

    def tensors(self) -> dict[str, torch.Tensor]:
        ids, aux, final = (torch.cat([part[i] for part in self._parts]) for i in (1, 2, 3))
        return {"aux_hidden_states": aux, "final_hidden_state": final, "input_ids": ids.to(torch.int64)}


class _Marked(list):
    """A list of the forward batch that also carries its captures.

    SGLang copies a forward batch field by field: an attribute of our own on it would be lost, its lists are handed on.
    `rids` reaches the logits processor in an eager run, `extend_seq_lens_cpu` also where a prefill graph builds a batch
    of its own (read in SGLang's source, not run: launch.py keeps these graphs off). A drafter's batches stay unmarked.
    """

    def __init__(self, items: Iterable[Any], captures: list[tuple[int, Capture]]) -> None:
        super().__init__(items)
        self.captures = captures


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
    """What the hooks do, one per process. Each takes what it is hooked to takes; AFTER hooks take its result first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events = folder / f"events.{os.getpid()}.jsonl"
        self._announced = False

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
        if captures:
            forward_batch.rids = _Marked(forward_batch.rids, captures)
            if forward_batch.extend_seq_lens_cpu is not None:
                forward_batch.extend_seq_lens_cpu = _Marked(forward_batch.extend_seq_lens_cpu, captures)

    @_guarded
    def _begin(self, req: Any, server_args: Any) -> Capture | None:
        if not asks(req) or not is_writer():
            return None
        refusal = why_refused(req, server_args)
        if refusal:
            self.event("refused", req.rid, why=refusal)
            return None
        # The file of an earlier request with this rid must never pass for this one's.
        self._file(req.rid).unlink(missing_ok=True)
        return Capture()

    @_guarded
    def on_states(self, _processor: Any, *args: Any, **named: Any) -> None:
        """Copy the rows of the marked requests; SGLang's models pass some arguments by name."""
        given = dict(zip(_STATES_ARGUMENTS, args, strict=False)) | named
        captures = captures_of(given["logits_metadata"])
        try:
            if captures:
                collect(captures, **given)
        except Exception as error:  # noqa: BLE001 - the requests of this batch have lost rows
            for _index, capture in captures:
                capture.fail(f"{type(error).__name__}: {error}")

    @_guarded
    def on_answer(self, _streamer: Any, reqs: Any, _logprob: Any = None, skip_req: Any = None, **_: Any) -> None:
        """A request passes here finished exactly once, before its final answer leaves."""
        for req in reqs:
            if req is not skip_req and req.finished() and not req.finished_output:
                self.finish(req)

    @_guarded
    def on_abort(self, _result: Any, _scheduler: Any, abort_req: Any, req: Any) -> None:
        """A request that ends outside the stream of answers: in the queue, in chunked prefill, by retraction."""
        self._end_aborted(req, abort_req.finished_reason)

    @_guarded
    def finish(self, req: Any) -> None:
        """Publish the request's file, or say why not."""
        reason = req.finished_reason.to_json()
        if reason.get("type") == "abort":
            self._end_aborted(req, reason)
            return
        capture = self._take(req)
        if capture is None:
            return
        prompt = list(req.origin_input_ids)
        output = list(req.output_ids[: req.finished_len])  # a stop may leave tokens behind it
        rows = len(prompt) + len(output) - 1
        if capture.failure or not output or capture.rows < rows:
            self.event("incomplete", req.rid, why=capture.failure or f"{capture.rows} rows captured instead of {rows}")
            return
        capture.rewind(rows)
        tensors = capture.tensors()
        if tensors["input_ids"].tolist() != (prompt + output)[:-1]:
            self.event("ids_mismatch", req.rid, why="the captured token ids are not those of prompt and answer")
            return
        numbers = {
            "prompt_tokens": len(prompt),
            "output_tokens": len(output),
            "rows": rows,
            "last_token_id": output[-1],
        }
        metadata = {name: str(value) for name, value in numbers.items()}
        metadata |= {"rid": req.rid, "finish": json.dumps(reason), "tap_version": TAP_VERSION}
        publish(self._file(req.rid), lambda path: save_file(tensors, path, metadata))
        self.event("published", req.rid, rows=rows)

    def _end_aborted(self, req: Any, reason: Any) -> None:
        capture = self._take(req)
        if capture is not None:
            why = reason.get("message") if isinstance(reason, dict) else None
            self.event("aborted", req.rid, why=why or "aborted by the client", rows=capture.rows)

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
    """Whether a request wants its states: `custom_params = {"tap": true}`, nothing else counts."""
    params = getattr(req.sampling_params, "custom_params", None)
    return isinstance(params, dict) and params.get("tap") is True


def why_refused(req: Any, server_args: Any) -> str | None:
    """Why a request that asks cannot be captured, None where it can."""
    if not _SAFE_RID.fullmatch(req.rid):
        return "the rid does not serve as a file name: 1 to 128 of A-Z a-z 0-9 . _ -, no dot first"
    params = req.sampling_params
    if (params.n or 1) > 1 or (params.beam_width or 1) > 1:
        return "several answers for one request (n, beam_width): ask for one"
    if (server_args.speculative_eagle_topk or 1) > 1:
        return "the server drafts trees (--speculative-eagle-topk above 1): rows of rejected branches could pass"
    return None


def is_writer() -> bool:
    """Every rank of an attention group sees the same full-width rows: one of them writes."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def captures_of(forward_batch: Any) -> list[tuple[int, Capture]]:
    lists = (getattr(forward_batch, name, None) for name in ("rids", "extend_seq_lens_cpu"))
    return next((marked.captures for marked in lists if isinstance(marked, _Marked)), [])


def collect(
    captures: list[tuple[int, Capture]], input_ids: Any, hidden_states: Any, logits_metadata: Any, **more: Any
) -> None:
    """Copy the captured requests' rows out of a forward pass: the engine uses the memory of every tensor again."""
    aux = more.get("aux_hidden_states")
    if aux is None or len(aux) == 0:
        raise ValueError("the model captures no layers: the server runs without --enable-return-aux-hidden-states")
    every = _spans(logits_metadata)
    spans = [every[index] for index, _ in captures]
    layers = [aux] if isinstance(aux, torch.Tensor) else aux  # packed, or a list of one tensor per layer
    tensors = (
        _rows(logits_metadata.positions, spans),
        _rows(input_ids, spans),
        torch.cat([_rows(layer, spans) for layer in layers], dim=-1),
        _rows(hidden_states, spans),
    )
    lengths = [end - start for start, end in spans]
    # One transfer per tensor. A sequence that is sharded over ranks has too few rows, which split refuses.
    split = [tensor.cpu().split(lengths) for tensor in tensors]
    for (_, capture), positions, *rows in zip(captures, *split, strict=True):
        where = positions.tolist()
        if where != list(range(where[0], where[0] + len(where))):
            capture.fail("its rows are not consecutive positions: a draft tree, or a sequence sharded over ranks")
        else:
            # A view would keep the rows of the whole batch in memory.
            capture.write(where[0], *(rows if len(spans) == 1 else [part.clone() for part in rows]))


def _spans(forward_batch: Any) -> list[tuple[int, int]]:
    """First and last row of every request of the batch in its packed tensors."""
    mode, size = forward_batch.forward_mode, forward_batch.batch_size
    if mode.is_target_verify():
        lengths: Sequence[int] = [forward_batch.spec_info.draft_token_num] * size
    elif mode.is_decode():
        lengths = [1] * size
    elif mode.is_extend():
        lengths = forward_batch.extend_seq_lens_cpu
    else:
        raise ValueError(f"a batch of mode {mode.name} is not known to the tap")
    ends = list(accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))


def _rows(packed: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """The rows of the spans, joined, as a tensor of their own."""
    return torch.cat([packed[start:end] for start, end in spans])


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


def publish(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its place and move it there: it is whole or absent. What failed is removed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
