"""Several dumps read as one: of one target, captured alike."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from eagle3.dump.manifest import DumpError, Manifest, SampleRecord
from eagle3.dump.reader import Sample, SampleReader


class JoinedReader:
    """Dumps side by side, in the order given. A sample's id is its own after the first 12 digits of its dump's digest.

    `manifest` is the first dump's: what decides a training (capture, target, tokenizer, number type) is the same in
    all. DumpError names what differs, or a dump that is given twice.
    """

    def __init__(self, readers: Sequence[SampleReader]) -> None:
        if not readers:
            raise DumpError("no dump was given: at least one is needed")
        self.manifest: Manifest = readers[0].manifest
        digests = [reader.manifest.digest() for reader in readers]
        for digest, reader in zip(digests, readers, strict=True):
            if digests.count(digest) > 1:
                raise DumpError(f"the dump {digest[:16]} is given twice: its samples would weigh twice")
            if differences := _differences(self.manifest, reader.manifest):
                raise DumpError(
                    f"the dumps {digests[0][:16]} and {digest[:16]} cannot be trained on together: "
                    f"{'; '.join(differences)}. Extract both with one target and one capture spec"
                )
        self._readers = list(readers)
        self.records: list[SampleRecord] = []
        self._places: list[tuple[int, int]] = []
        for number, (digest, reader) in enumerate(zip(digests, readers, strict=True)):
            for index, record in enumerate(reader.records):
                self.records.append(record.model_copy(update={"id": f"{digest[:12]}/{record.id}"}))
                self._places.append((number, index))

    def read(self, index: int) -> Sample:
        """The sample at that place."""
        number, own = self._places[index]
        return replace(self._readers[number].read(own), id=self.records[index].id)

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, loss mask), each [rows + 1]; no state is read."""
        number, own = self._places[index]
        return self._readers[number].tokens(own)


def _differences(one: Manifest, other: Manifest) -> list[str]:
    pairs = {
        "capture spec": (one.spec, other.spec),
        "target": (one.target, other.target),
        "tokenizer": (one.tokenizer, other.tokenizer),
        "number type": (one.dtype, other.dtype),
    }
    return [f"{name} is {a} and {b}" for name, (a, b) in pairs.items() if a != b]
