"""Other people's dumps, read without executing anything of theirs."""

from eagle3.dump.foreign.dump import LAYOUTS, ForeignDump, UnknownLayout, open_foreign
from eagle3.dump.foreign.loading import ForeignPickle
from eagle3.dump.foreign.sample import FINAL, ForeignSample, MissingIds

__all__ = [
    "FINAL",
    "LAYOUTS",
    "ForeignDump",
    "ForeignPickle",
    "ForeignSample",
    "MissingIds",
    "UnknownLayout",
    "open_foreign",
]
