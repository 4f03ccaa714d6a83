"""What every byte of the shards says: files against digests, samples against digests, statistics of the rows.

This is the work that grows with a dump, and the shards are independent: `parts_of` shares them out, `examine_shards`
looks at one part wherever it runs, and the parts are joined in order. Who looked at which part changes nothing.
"""

from eagle3.dump.manifest import DumpError, Manifest
from eagle3.dump.reader import DumpReader
from eagle3.evidence.files import FileIntegrity
from eagle3.evidence.integrity import Content
from eagle3.evidence.norms import RowNorms

MAX_PARTS = 128
"""Parts of a dump, whatever its size: what was seen of each (under 1 MB at width 7168) is kept till all are joined."""


class ShardEvidence:
    """What was seen of some neighbouring shards; small, and it can be sent between processes."""

    def __init__(self, files: FileIntegrity, content: Content, norms: RowNorms) -> None:
        self.files, self.content, self.norms = files, content, norms
        self.unread: dict[str, str] = {}  # sample id -> why it could not be read

    @classmethod
    def begin(cls, reader: DumpReader) -> "ShardEvidence":
        """Nothing seen yet."""
        manifest = reader.manifest
        return cls(FileIntegrity(reader.folder, manifest.digest()), Content(manifest), RowNorms(manifest))

    def join(self, later: "ShardEvidence") -> None:
        """What was seen of the shards that follow."""
        self.files.join(later.files)
        self.content.join(later.content)
        self.norms.join(later.norms)
        self.unread |= later.unread


def parts_of(manifest: Manifest) -> list[range]:
    """The shards of a dump in order, in at most `MAX_PARTS` stretches; the same for the same dump."""
    shards = len(manifest.shards)
    count = min(shards, MAX_PARTS)
    return [range(part * shards // count, (part + 1) * shards // count) for part in range(count)]


def examine_shards(reader: DumpReader, shards: range) -> ShardEvidence:
    """Look at every byte of these shards, and of the answers kept beside them. One sample is in memory at a time.

    What is damaged is part of the answer, not an error.
    """
    seen = ShardEvidence.begin(reader)
    for shard in shards:
        entry = reader.manifest.shards[shard]
        for file in (entry, *([entry.answers] if entry.answers else [])):
            seen.files.see_file(file)  # just before its samples, which then come from memory
        for index in reader.samples_of(shard):
            try:
                sample = reader.read(index)
            except DumpError as error:
                seen.unread[reader.records[index].id] = str(error)
                continue
            seen.content.see(sample)
            seen.norms.see(sample)
    return seen
