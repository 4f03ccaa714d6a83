"""What a dump contains, as digests that do not depend on how it is packed."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from eagle3.capture import CapturePoint
from eagle3.digests import canonical_json, merkle
from eagle3.dump.manifest import SampleRecord

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def sample_digest(
    sample_id: str,
    ids_sha256: str,
    prompt_tokens: int,
    states: Mapping[CapturePoint, torch.Tensor],
    points: Sequence[CapturePoint],
    spans: Sequence[tuple[int, int]] = (),
) -> str:
    """sha256 over a sample: its id, its token ids, where its answer begins (where each lies, if it has several: `spans`
    of its record), and every state in the order of `points`.

    Each tensor is hashed as its name, dtype and shape, then its bytes (little-endian, row by row), so that no two
    samples give the same bytes. A slot that is renamed, moved or stored in another dtype changes the digest.
    """
    places = [[*span] for span in spans]
    digest = hashlib.sha256(canonical_json([sample_id, ids_sha256, prompt_tokens, *([places] if places else [])]))
    for point in points:
        state = states[point]
        digest.update(canonical_json([point, dtype_name(state.dtype), list(state.shape)]))
        digest.update(state.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def loss_mask(record: SampleRecord) -> torch.Tensor:
    """[rows] bool: True where the row's token belongs to an answer. The last answer's last token has no row."""
    mask = torch.zeros(record.rows, dtype=torch.bool)
    for start, end in record.answer_spans:
        mask[start:end] = True
    return mask


def content_digest(digests: Iterable[tuple[str, str]]) -> str:
    """Merkle root over (sample id, sample digest) in order of id: the same however the dump was packed or ordered."""
    return merkle(digest for _, digest in sorted(digests))
