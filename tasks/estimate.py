"""What an extraction takes: tokens, bytes, seconds, money. Arithmetic alone: nothing is read and nobody is asked."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

TokensFrom = Literal["tokenised", "estimated", "assumed"]
# Tokens a second, read and written, where the configuration names none. Written on a CPU: SmolLM2-135M on two cores
# (docs/benchmarks.md); the others are round assumptions.
_ON_GPU, _ON_CPU = (5000.0, 1000.0), (500.0, 95.0)


class PlanParams(BaseModel):
    """Assumptions of a plan. They change no run: they say what it is going to cost."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Plan")

    prefill_tokens_per_second: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        title="Reading speed",
        description="Tokens a second that one server reads while it captures, all its GPUs together; unset: 5000, on a "
        "CPU 500",
    )
    decode_tokens_per_second: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        title="Writing speed",
        description="Tokens a second that one server writes, all streams and GPUs together; unset: 1000, on a CPU 95",
    )
    upload_mb_per_second: float = Field(
        200.0, gt=0, allow_inf_nan=False, title="Upload", description="Megabytes (10^6) a second into the store"
    )
    price_per_gpu_hour: float | None = Field(
        None, ge=0, allow_inf_nan=False, title="Price of a GPU-hour", description="Unset: no money is stated"
    )
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", title="Currency", description="Of that price")
    mean_answer_tokens: int | None = Field(
        None, ge=1, title="Mean answer", description="Tokens; unset: every answer is taken to be the longest allowed"
    )
    mean_prompt_tokens: int = Field(
        512, ge=1, title="Mean prompt", description="Tokens; used where the prompts are not on this machine"
    )
    text_bytes_per_token: float = Field(
        3.0,
        gt=0,
        allow_inf_nan=False,
        title="Bytes of text a token",
        description="UTF-8; used where the tokenizer is not on this machine. Smaller is safer",
    )

    def speeds(self, *, on_gpu: bool) -> tuple[float, float]:
        """Tokens a second that are read and written."""
        reading, writing = _ON_GPU if on_gpu else _ON_CPU
        return self.prefill_tokens_per_second or reading, self.decode_tokens_per_second or writing


class PromptTokens(BaseModel):
    """How long the prompts are, and how that is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_prompts: int = Field(gt=0)
    tokens: int = Field(gt=0, description="Of all prompts, the chat template included where they were tokenised")
    given: int | None = Field(None, description="Tokens of all answers, where they are given; None: the target answers")
    longest: int = Field(gt=0, description="Tokens of the longest prompt, with its answer where that is given")
    known: TokensFrom
    where: str = Field(description="The file, or what stands in for it")


class Estimate(BaseModel):
    """Figures of one extraction. `most_...` are upper bounds, the others rest on `assumptions`.

    Seconds are those of the clock: partitions are captured at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: PromptTokens
    answer_tokens: int
    rows: int = Field(description="Captured tokens: prompt and answer without its last token")
    most_rows: int = Field(description="With every answer as long as allowed")
    bytes_per_token: int = Field(description="Of the states")
    bytes: int
    most_bytes: int
    reading_seconds: float = Field(description="Prompts, and the answers again where they are captured by a prefill")
    answering_seconds: float
    upload_seconds: float = Field(description="Beside the capture")
    seconds: float = Field(description="The longer of capture and upload; without the server's start")
    num_gpus: int
    gpu_hours: float
    money: float | None
    currency: str
    assumptions: tuple[str, ...]

    @property
    def most_answer_tokens(self) -> int:
        """With every answer as long as allowed: all but its last token has a row."""
        return self.most_rows - self.prompts.tokens + self.prompts.num_prompts

    def lines(self) -> dict[str, str]:
        """The figures for a person, by heading."""
        prompts = self.prompts
        how = {"tokenised": "by the target's tokenizer", "estimated": "estimated", "assumed": "assumed"}[prompts.known]
        time = f"{duration(self.answering_seconds)} answering, {duration(self.reading_seconds)} reading"
        return {
            "tokens": f"{prompts.tokens:,} of {prompts.num_prompts:,} prompts ({how}), {self.answer_tokens:,} of "
            f"answers: {self.rows:,} rows, at most {self.most_rows:,}",
            "bytes": f"{self.bytes_per_token:,} of states a token: {size(self.bytes)}, at most {size(self.most_bytes)}",
            "time": f"{duration(self.seconds)}: {time}; upload {duration(self.upload_seconds)} beside it; the server's "
            "start comes on top",
            "money": self._money(),
        }

    def _money(self) -> str:
        if not self.num_gpus:
            return "no GPU is used"
        hours = f"{self.num_gpus} GPUs for {duration(self.seconds)} are {self.gpu_hours:,.1f} GPU-hours"
        if self.money is None:
            return f"{hours}; no price is set (plan.price_per_gpu_hour)"
        return f"{hours}: {self.money:,.2f} {self.currency}"


def estimate(
    plan: PlanParams,
    prompts: PromptTokens,
    *,
    max_new_tokens: int,
    bytes_per_token: int,
    row_bytes: int,
    read_again: bool,
    num_gpus: int,
    partitions: int = 1,
) -> Estimate:
    """The figures from what is known and what is assumed.

    `row_bytes` come on top of the states of a token; `read_again`: answers are captured by a second pass, a prefill;
    `num_gpus` of one server, 0 on a CPU; `partitions`: each has a server of its own.
    """
    count = prompts.num_prompts
    answers, most_answers = prompts.given, prompts.given
    if answers is None or most_answers is None:
        most_answers = count * max_new_tokens
        answers = count * min(plan.mean_answer_tokens or max_new_tokens, max_new_tokens)
    rows, most_rows = (prompts.tokens + tokens - count for tokens in (answers, most_answers))
    per_row = bytes_per_token + row_bytes
    is_given = prompts.given is not None
    read = rows if is_given else prompts.tokens + (rows if read_again else 0)
    reading_speed, writing_speed = plan.speeds(on_gpu=num_gpus > 0)
    reading = read / reading_speed / partitions
    answering = 0.0 if is_given else answers / writing_speed / partitions
    upload = rows * per_row / (plan.upload_mb_per_second * 1e6) / partitions
    seconds = max(reading + answering, upload)
    all_gpus = num_gpus * partitions
    gpu_hours = all_gpus * seconds / 3600
    return Estimate(
        prompts=prompts,
        answer_tokens=answers,
        rows=rows,
        most_rows=most_rows,
        bytes_per_token=bytes_per_token,
        bytes=rows * per_row,
        most_bytes=most_rows * per_row,
        reading_seconds=reading,
        answering_seconds=answering,
        upload_seconds=upload,
        seconds=seconds,
        num_gpus=all_gpus,
        gpu_hours=gpu_hours,
        money=gpu_hours * plan.price_per_gpu_hour if num_gpus and plan.price_per_gpu_hour is not None else None,
        currency=plan.currency,
        assumptions=tuple(_assumptions(plan, prompts, max_new_tokens, num_gpus, partitions)),
    )


def most_staged(asked: int, *, shard_bytes: int, longest: int, row_bytes: int) -> int:
    """What an extraction may keep on the staging disk at once: what was asked, but no less than it takes to go on.

    `longest`: tokens of the longest sample. Rows count twice: as they are staged, and in their shard.
    """
    return max(asked, 2 * (shard_bytes + longest * row_bytes))


def _assumptions(
    plan: PlanParams, prompts: PromptTokens, max_new_tokens: int, num_gpus: int, partitions: int
) -> list[str]:
    reading, writing = plan.speeds(on_gpu=num_gpus > 0)
    said = [
        f"one server reads {reading:,.0f} tokens/s and writes {writing:,.0f} (plan.prefill_tokens_per_second, "
        "plan.decode_tokens_per_second)",
        f"the store takes {plan.upload_mb_per_second:,.0f} MB/s (plan.upload_mb_per_second)",
    ]
    if partitions > 1:
        said.append(f"{partitions} partitions run at once, each with a worker, a server and an upload of its own")
    if prompts.given is None and plan.mean_answer_tokens is None:
        said.append(f"every answer has {max_new_tokens:,} tokens, the most allowed (plan.mean_answer_tokens)")
    elif prompts.given is None or prompts.known == "assumed":
        mean = plan.mean_answer_tokens or max_new_tokens
        said.append(f"an answer has {mean:,} tokens on average (plan.mean_answer_tokens)")
    if prompts.known == "estimated":
        said.append(
            f"a token is {plan.text_bytes_per_token:g} bytes of text (plan.text_bytes_per_token): the tokenizer is not "
            "on this machine; the chat template's own tokens are not counted"
        )
    if prompts.known == "assumed":
        said.append(
            f"a prompt has {plan.mean_prompt_tokens:,} tokens on average (plan.mean_prompt_tokens): the prompts are "
            "not on this machine"
        )
    if num_gpus and plan.price_per_gpu_hour is not None:
        said.append(f"a GPU-hour costs {plan.price_per_gpu_hour:g} {plan.currency} (plan.price_per_gpu_hour)")
    return said


def size(num_bytes: float) -> str:
    """Bytes for a person, in powers of 1000 as disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} TB"


def duration(seconds: float) -> str:
    """Seconds for a person."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"
