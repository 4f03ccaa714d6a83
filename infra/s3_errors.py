"""What boto3 raises, as a StoreError that names the object, the server and what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as S3ConnectionError
from botocore.parsers import ResponseParserError

from infra.store import MissingBucket, StoreCorrupt, StoreDenied, StoreError, StoreUnreachable, missing

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403", "401"}
_RETRIED = {500, 502, 503, 504}
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE", "record layer failure")


class S3Errors:
    """The errors of one bucket of one server; `check_bucket` raises ClientError where the bucket is not there."""

    def __init__(self, endpoint: str | None, bucket: str, attempts: int, check_bucket: Callable[[], None]) -> None:
        self._endpoint, self._bucket, self._attempts = endpoint, bucket, attempts
        self._check_bucket = check_bucket
        self.server = endpoint or "AWS S3"

    @contextmanager
    def cleared(self, uri: str) -> Iterator[None]:
        """Around calls of boto3 about the object at `uri`."""
        try:
            yield
        except (ClientError, BotoCoreError, ResponseParserError) as error:
            raise self._explain(error, uri) from error

    def field(self, answer: dict[str, Any], name: str, uri: str) -> Any:
        """A field that every S3 server sends; a StoreError where it is missing."""
        if answer.get(name) is None:
            raise self._no_s3(f"an answer without {name}", uri)
        return answer[name]

    def _explain(self, error: Exception, uri: str) -> StoreError:
        if isinstance(error, ClientError):
            return self._explain_answer(error, uri)
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreDenied(
                f"{uri}: there are no credentials for {self.server}. Set EAGLE3_S3_ACCESS_KEY and EAGLE3_S3_SECRET_KEY "
                "(or AWS's own variables or profile), or start the local stack with `eagle3 up`, which makes its own."
            )
        if isinstance(error, FlexibleChecksumError):
            return StoreCorrupt(f"{uri}: what came is not what {self.server} has the checksum of ({error}).")
        if isinstance(error, ResponseParserError):
            return self._no_s3("an answer that cannot be read, damaged on its way or of another kind", uri)
        if isinstance(error, S3ConnectionError | HTTPClientError | IncompleteReadError):
            return self._unreachable(error, uri)
        return StoreError(f"{uri}: {self.server}: {error}")

    def _explain_answer(self, error: ClientError, uri: str) -> StoreError:
        about = error.response.get("ResponseMetadata", {})
        code, status = code_of(error), about.get("HTTPStatusCode")
        if status in _RETRIED:
            message = error.response.get("Error", {}).get("Message", "")
            return StoreUnreachable(
                f"{uri}: {self.server} answered {status} {code} in each of {self._attempts} attempts: {message}. "
                "The server is overloaded, full or broken: see its log, then start again."
            )
        if code in _DENIED or status == 403:
            return StoreDenied(
                f"{uri}: {self.server} refused ({code}). Check EAGLE3_S3_ACCESS_KEY and EAGLE3_S3_SECRET_KEY, and what "
                f"that key may do on bucket {self._bucket!r}."
            )
        if (not code or code.isdigit()) and not any(name.startswith("x-amz-") for name in about.get("HTTPHeaders", {})):
            return self._no_s3(f"{status} without a word of S3", uri)
        if code in {"404", "NoSuchKey", "NoSuchBucket"}:
            return self._absent(code, uri)
        if code in {"PreconditionFailed", "412"}:
            return StoreCorrupt(f"{uri} was replaced while it was read. Fetch it again.")
        message = error.response.get("Error", {}).get("Message", "")
        return StoreError(f"{uri}: {self.server} answered {status} {code}: {message}")

    def _absent(self, code: str, uri: str) -> StoreError:
        try:
            if code != "NoSuchBucket":
                self._check_bucket()
                return missing(uri)
        except ClientError as error:
            if code_of(error) != "404":
                return self._explain_answer(error, uri)
        except BotoCoreError as error:
            return self._explain(error, uri)
        return MissingBucket(
            f"{uri}: bucket {self._bucket!r} does not exist on {self.server}. `eagle3 up` makes it (or the store's "
            "ensure_bucket()); for another bucket set EAGLE3_STORE."
        )

    def _no_s3(self, what: str, uri: str) -> StoreError:
        return StoreError(
            f"{uri}: {self.server} gave {what}: that is no S3 server, or something between changes what it says. "
            "Check EAGLE3_S3_ENDPOINT."
        )

    def _untrusted(self, error: SSLError, uri: str) -> StoreError:
        said = str(error)
        if any(word in said for word in _NO_TLS):
            todo = "The server speaks no TLS at this address: EAGLE3_S3_ENDPOINT begins with http:// then."
        elif "CERTIFICATE_VERIFY_FAILED" in said:
            todo = (
                "Its certificate is not one that this machine trusts: set AWS_CA_BUNDLE to the file (PEM) of the "
                "authority that signed it, and let the endpoint have the host name that stands in it."
            )
        else:
            todo = "Check EAGLE3_S3_ENDPOINT and the server's certificate."
        return StoreUnreachable(f"{uri}: no TLS connection to {self.server}: {said}. {todo}")

    def _unreachable(self, error: Exception, uri: str) -> StoreError:
        if isinstance(error, SSLError):
            return self._untrusted(error, uri)
        if urlsplit(self._endpoint or "").hostname in _LOOPBACK:
            todo = "Start it with `eagle3 up` (`eagle3 status` shows the parts), or set EAGLE3_S3_ENDPOINT."
        else:
            todo = "Check the network and EAGLE3_S3_ENDPOINT."
        return StoreUnreachable(
            f"{uri}: the S3 server {self.server} does not answer after {self._attempts} attempts "
            f"({type(error).__name__}). {todo}"
        )


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
