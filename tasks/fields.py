"""Fields that the forms of an extraction and of a pipeline share."""

from typing import Annotated

from pydantic import Field

MAX_PARTITIONS = 128
ShardMib = Annotated[int, Field(ge=1, title="Shard size", description="MiB")]
StagingMib = Annotated[
    int,
    Field(
        ge=1,
        title="Staging",
        description="Most MiB of rows and shards on the worker's disk at once (at least two shards): no prompt is sent "
        "while more would wait for the store",
    ),
]
Resume = Annotated[
    str,
    Field(
        pattern=r"^(auto|new|(s3|file)://.+)$",
        title="Resume",
        description="auto: go on with an unfinished extraction of this name that asked for the same; new: leave it and "
        "begin anew; or the URI of the one to go on with",
    ),
]
Partitions = Annotated[
    int,
    Field(
        ge=1,
        le=MAX_PARTITIONS,
        title="Partitions",
        description="More than one: the prompts are split, each part is a flow run on the GPU workers' pool, and one "
        "manifest is written over all. The extraction itself then runs in the other pool: extract/cpu",
    ),
]
