"""Asking a SGLang server: what it is, and answers to prompts given as token ids."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from eagle3.acceptance.definitions import AcceptanceError, RequestCounts, counts_from_sglang
from eagle3.errors import Eagle3Error
from infra.sglang.info import ModelInfo, ServerInfo, capture_problems, decode_graphs_off

__all__ = [
    "GenerateRequest",
    "Generated",
    "ModelInfo",
    "ServerInfo",
    "SglangClient",
    "SglangError",
    "capture_problems",
    "decode_graphs_off",
]

# A token's share of an answer is under 20 bytes; /server_info of a large server is under 100 kB.
MAX_RESPONSE_BYTES = 64 * 2**20
CONNECT_TIMEOUT = 10.0  # seconds
ASK_TIMEOUT = 60.0  # seconds, for everything but an answer
# Seconds that an answer may take: for queue and prefill, and for each token that may come. A slower one is stuck.
ANSWER_TIMEOUT = 600.0
TOKEN_TIMEOUT = 2.0


class SglangError(Eagle3Error):
    """A server that cannot be reached, refuses, or answers with something else than expected."""


class GenerateRequest(BaseModel):
    """One prompt. `rid` names the request: all rids of a run must have one width, since SGLang aborts by prefix."""

    model_config = ConfigDict(frozen=True)

    rid: str = Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")
    input_ids: tuple[int, ...] = Field(min_length=1)
    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(0.0, ge=0)
    ignore_eos: bool = False
    tap: bool | Literal["probe"] = Field(
        False,
        description="Ask the tap for this request's rows; `probe`: for every boundary too (one token to generate)",
    )


class Generated(BaseModel):
    """An answer."""

    model_config = ConfigDict(frozen=True)

    rid: str
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str = Field(description='"stop" or "length"')
    prompt_tokens: int
    completion_tokens: int
    latency_s: float = Field(description="Seconds from the server's receipt to its last token")
    counts: RequestCounts = Field(
        description="Of speculative decoding; no verification where the server does not draft"
    )


_Model = TypeVar("_Model", bound=BaseModel)


class SglangClient:
    """A client of one server; safe to use from several threads. Redirects are not followed, proxies not asked."""

    def __init__(self, url: str, *, api_key: SecretStr | None = None) -> None:
        if not re.fullmatch(r"https?://[^@\s]+", url):
            raise SglangError(
                f"{_without_userinfo(url)!r} is not the address of a server: expected one like http://127.0.0.1:30000 "
                "(a key is given as EAGLE3_SGLANG_API_KEY, never in the address)"
            )
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key.get_secret_value()}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(ASK_TIMEOUT, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            follow_redirects=False,
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_healthy(self, timeout: float = 30.0) -> bool:
        """Whether the server generates a token. It takes the server a second to say yes."""
        try:
            with self._http.stream("GET", "/health", timeout=timeout) as response:
                return response.status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def server_info(self) -> ServerInfo:
        return _parse(ServerInfo, self._ask("GET", "/server_info"), "/server_info")

    def model_info(self) -> ModelInfo:
        return _parse(ModelInfo, self._ask("GET", "/model_info"), "/model_info")

    def flush_cache(self) -> None:
        """Empty the radix cache; an error while requests are running."""
        self._ask("POST", "/flush_cache", as_json=False)

    def abort(self, rid: str) -> None:
        """End a request **and every other whose rid starts with this one** (SGLang's rule)."""
        if not rid:
            raise SglangError("an empty rid would abort every request: name one")
        self._ask("POST", "/abort_request", {"rid": rid}, as_json=False)

    def generate(
        self,
        input_ids: Sequence[int],
        *,
        rid: str,
        max_new_tokens: int,
        temperature: float = 0.0,
        ignore_eos: bool = False,
        tap: bool = False,
        timeout: float | None = None,
    ) -> Generated:
        """The answer to one prompt. `timeout` in seconds, until the whole answer is there; None: see `answer`."""
        request = GenerateRequest(
            rid=rid,
            input_ids=tuple(input_ids),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
            tap=tap,
        )
        return self.answer(request, timeout=timeout)

    def answer(self, request: GenerateRequest, *, timeout: float | None = None) -> Generated:
        """The answer to one request. `timeout` in seconds; None: what an answer of its greatest length may take."""
        if timeout is None:
            timeout = ANSWER_TIMEOUT + TOKEN_TIMEOUT * request.max_new_tokens
        sampling: dict[str, Any] = {
            "temperature": request.temperature,
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": request.ignore_eos,
        }
        if request.tap:
            sampling["custom_params"] = {"tap": request.tap}
        body: dict[str, Any] = {"rid": request.rid, "input_ids": list(request.input_ids), "sampling_params": sampling}
        if request.tap == "probe":
            # A prefix that another request left in the radix cache would not be computed, and its rows not be seen.
            body["extra_key"] = request.rid
        what = f"request {request.rid}"
        payload = self._ask("POST", "/generate", body, timeout=timeout, what=what)
        return _generated(request, payload, what)

    def generate_many(
        self,
        requests: Iterable[GenerateRequest],
        *,
        streams: int,
        on_done: Callable[[Generated], None] | None = None,
        timeout: float | None = None,
    ) -> list[Generated]:
        """Answers in the order of the requests, `streams` of them at a time. `on_done` is called in the calling thread.

        `timeout` is that of each answer, as in `answer`.
        The first failure aborts the requests that are running, and is raised with the rid in its message.
        """
        requests = list(requests)
        _check_rids(requests)
        with ThreadPoolExecutor(max_workers=streams, thread_name_prefix="sglang") as pool:
            futures = {pool.submit(self.answer, request, timeout=timeout): request for request in requests}
            try:
                for future in as_completed(futures):
                    answer = future.result()
                    if on_done:
                        on_done(answer)
            except BaseException:
                self._cancel(futures)
                raise
        return [future.result() for future in futures]

    def _cancel(self, futures: dict[Future[Generated], GenerateRequest]) -> None:
        for future, request in futures.items():
            if future.cancel() or future.done():
                continue
            try:
                self.abort(request.rid)
            except SglangError:
                return  # the server is gone; its requests end by themselves

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float = ASK_TIMEOUT,
        what: str | None = None,
        as_json: bool = True,
    ) -> Any:
        what = what or path
        try:
            with self._http.stream(
                method, path, json=body, timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT)
            ) as response:
                content = _read(response, what)
                status = response.status_code
        except httpx.TimeoutException:
            raise SglangError(f"{what}: no answer from {self.url} within {timeout:g} s") from None
        except httpx.HTTPError as error:
            raise SglangError(
                f"{what}: the SGLang server at {self.url} cannot be reached ({type(error).__name__}: {error}). Is it "
                "running? Its log tells why it ended."
            ) from None
        if status != httpx.codes.OK:
            raise SglangError(f"{what}: {self.url} answered {status}: {_reason(content)}")
        if not as_json:
            return None
        try:
            return json.loads(content)
        except ValueError:
            raise SglangError(f"{what}: {self.url} answered something that is not JSON: {_reason(content)}") from None


def _without_userinfo(url: str) -> str:
    return re.sub(r"//[^/]*@", "//", url)


def _read(response: httpx.Response, what: str) -> bytes:
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > MAX_RESPONSE_BYTES:
            raise SglangError(f"{what}: the answer is longer than {MAX_RESPONSE_BYTES} bytes")
    return bytes(content)


def _reason(content: bytes) -> str:
    text = content[:2000].decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
        text = str(parsed["error"]["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:500] or "(empty)"


def _parse(model: type[_Model], payload: Any, what: str) -> _Model:
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        fields = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise SglangError(f"{what}: not what a SGLang server answers ({fields})") from None


def _generated(request: GenerateRequest, payload: Any, what: str) -> Generated:
    try:
        meta = payload["meta_info"]
        finish = meta["finish_reason"]
        kind = finish["type"] if isinstance(finish, dict) else str(finish)
        answer = {
            "rid": meta["id"],
            "output_ids": payload["output_ids"],
            "text": payload["text"],
            "finish_reason": kind,
            "prompt_tokens": meta["prompt_tokens"],
            "completion_tokens": meta["completion_tokens"],
            "latency_s": meta["e2e_latency"],
            "counts": counts_from_sglang(meta),
        }
    except (KeyError, TypeError, IndexError) as error:
        raise SglangError(f"{what}: the answer lacks {error}") from None
    except AcceptanceError as error:
        raise AcceptanceError(f"{what}: {error}") from None
    if kind not in ("stop", "length"):
        message = finish.get("message", "") if isinstance(finish, dict) else ""
        raise SglangError(f"{what}: ended as {kind!r} instead of an answer. {_reason(str(message).encode())}")
    if answer["rid"] != request.rid:
        raise SglangError(f"{what}: the server answered for rid {answer['rid']!r}")
    return _parse(Generated, answer, what)


def _check_rids(requests: Sequence[GenerateRequest]) -> None:
    rids = [request.rid for request in requests]
    if len(set(rids)) != len(rids):
        raise SglangError("two requests have the same rid")
    widths = {len(rid) for rid in rids}
    if len(widths) > 1:
        raise SglangError(
            f"rids of different widths ({min(widths)} to {max(widths)} characters): SGLang aborts by prefix, so that "
            "aborting r-1 would end r-10 too. Pad the numbers with zeros."
        )
