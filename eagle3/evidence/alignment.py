"""Does the final state belong to the tokens beside it? Through the target's head it must give the greedy answer again.

Answers that were sampled, prompts, and text that somebody else wrote: `eagle3.evidence.text_alignment`.
"""

import torch

from eagle3.dump.manifest import Manifest
from eagle3.dump.reader import Sample
from eagle3.evidence.examination import Findings, spread
from eagle3.evidence.head import FinalStateParts, logit_pieces, normed_rows, obstacle, token_logits
from eagle3.evidence.report import Check, OffsetAgreement, Verdict
from eagle3.evidence.text import OFFSETS

__all__ = ["FinalState", "FinalStateParts", "final_obstacle", "share_of_rows"]

AGREEMENT = 0.98
"""Share of the answer's tokens that must come out again."""
NEAR_TIE = 0.02
"""A token within 2% of the way from the largest logit down to the mean one counts as given: two 16-bit paths through a
target (decode and prefill, two kernels) break near ties differently. Measured, 500 to 768 rows each: right dumps of
SmolLM2-135M 100% (strictly 100% in float32, 99.1% in bfloat16), of tiny bfloat16 targets 99.4-100% (strictly 96-99%);
the last layer but one 55-72%, the norm left out 18-84%, applied twice 37-82%, rows late by one 2%."""
SAMPLE_AGREEMENT, SAMPLE_ROWS = 0.5, 8
"""A sample with at least 8 judged rows and less than half of them right holds the rows of another one."""
SHIFT_AGREEMENT = 0.5
"""Another offset is named as the cause where at least half of the rows fit it: below that nothing fits."""
MAX_ROWS = 4096
"""Rows to judge of the whole dump; a dump of many samples gets more, so that each has its `SAMPLE_ROWS`."""
BATCH_ROWS = 1024
OUTSIDE = -1


class FinalState:
    """`final_state`: through the head, the final state of row t gives the token at t + 1, for every row of the answer.

    Judged on `MAX_ROWS` evenly spread rows where a dump has more, and on at least `SAMPLE_ROWS` of every sample: rows
    that two requests exchanged are found in a dump of any size. The same predictions are compared with the tokens at
    t + 1 - 2 ... t + 1 + 2, on rows whose neighbourhood does not repeat the token ("telling" rows): rows that are
    shifted against their ids fit another offset.

    A norm that was left out or applied twice shows as far as the norm's weights are uneven: even weights change no
    token, and then nothing here tells once from twice (attribution does).
    """

    def __init__(self, manifest: Manifest, parts: FinalStateParts, *, answer_tokens: int) -> None:
        """`answer_tokens`: output tokens of the whole dump, from which the share of rows to judge follows."""
        self._point, self._parts = manifest.spec.final, parts
        self._vocab_size, self._obstacle = manifest.target.vocab_size, final_obstacle(manifest, parts)
        self._answer_tokens = answer_tokens
        self._waiting: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # id, states [n, H], windows [n, offsets]
        self._waiting_rows = 0
        self._rows, self._right = 0, 0
        self._telling = torch.zeros(len(OFFSETS), dtype=torch.int64)
        self._telling_right = torch.zeros(len(OFFSETS), dtype=torch.int64)
        self._foreign = Findings()
        self._short = 0

    def see(self, sample: Sample) -> None:
        if self._obstacle:
            return
        record, ids = sample.record, sample.full_ids()
        # Rows prompt-1 ... prompt+output-2 predict the answer's tokens, which stand at prompt ... prompt+output-1.
        first, end = record.prompt_tokens - 1, record.rows
        if first >= end:  # rows are missing: `completeness` says so
            return
        rows = share_of_rows(first, end, of=self._answer_tokens, most=MAX_ROWS, least=SAMPLE_ROWS)
        places = rows[:, None] + 1 + torch.tensor(OFFSETS)  # [n, offsets]
        inside = (places >= record.prompt_tokens) & (places < len(ids))
        windows = torch.where(inside, ids[places.clamp(0, len(ids) - 1)], OUTSIDE)
        self._waiting.append((sample.id, sample.states[self._point][rows].clone(), windows))
        self._waiting_rows += len(rows)
        if self._waiting_rows >= BATCH_ROWS:
            self._score()

    def offsets(self) -> tuple[OffsetAgreement, ...]:
        """Agreement by offset, over the telling rows; empty where no row tells."""
        return tuple(
            OffsetAgreement(offset=offset, share=int(right) / int(rows))
            for offset, right, rows in zip(OFFSETS, self._telling_right, self._telling, strict=True)
            if rows
        )

    def conclude(self) -> list[Check]:
        self._score()
        obstacle = self._obstacle or ("" if self._rows else "the dump has no rows that predict an answer")
        if obstacle:
            return [self._check("fail", "not measured", f"The final state could not be judged: {obstacle}.")]
        share = self._right / self._rows
        verdict, sentence = self._judge(share)
        value = f"{share:.2%} of {self._rows} judged rows ({self._answer_tokens} predict an answer)"
        if self._short:
            value += f"; {self._short} samples have fewer than {SAMPLE_ROWS} and were not judged one by one"
        return [self._check(verdict, value, sentence)]

    def _judge(self, share: float) -> tuple[Verdict, str]:
        shares = {o.offset: o.share for o in self.offsets()}
        best = max(shares, key=lambda offset: shares[offset], default=0)
        shifted = best != 0 and shares[best] > shares.get(0, 0.0)
        if shifted and shares[best] >= SHIFT_AGREEMENT:
            late = "late" if best < 0 else "early"
            return "fail", (
                f"The final states fit the tokens at offset {best:+d} ({shares[best]:.0%}) and not at 0 "
                f"({shares.get(0, 0.0):.0%}): rows are {late} by {abs(best)} against the token ids. Look at where the "
                "capture cuts prompt, answer and first row, and extract again: a drafter would learn the wrong token."
            )
        if self._foreign.count and share >= SAMPLE_AGREEMENT:
            return "fail", (
                f"The final state does not give the answer again in {self._foreign}; the dump as a whole agrees on "
                f"{share:.1%}. These samples hold the rows of another request, or shifted ones: do not extract with "
                "speculative decoding on, look at the engine's batching, and extract them again."
            )
        if share < AGREEMENT:
            return "fail", (
                f"The final state gives only {share:.1%} of the greedy answer again, and no other offset fits. It is "
                "another layer's output than the last, or its norm was left out or applied twice, or head and norm are "
                "not of the checkpoint that served, or the answers were not greedy. Check the target's revision, the "
                "capture and the sampling, and extract again."
            )
        if not shares:
            return "warn", (
                "The final state gives the greedy answer again, but the answers repeat themselves so much that a shift "
                "of the rows could not be seen. Extract with other prompts."
            )
        return "pass", "Through the target's head the final state gives the greedy answer again, token for token."

    def _score(self) -> None:
        if not self._waiting:
            return
        windows = torch.cat([windows for _, _, windows in self._waiting])
        states = torch.cat([states for _, states, _ in self._waiting])
        batches = zip(states.split(BATCH_ROWS), windows.split(BATCH_ROWS), strict=True)
        right = torch.cat([self._given(*batch) for batch in batches])  # [rows, offsets]
        now = OFFSETS.index(0)
        start = 0
        for name, rows, _ in self._waiting:
            length = len(rows)
            hits = int(right[start : start + length, now].sum())
            start += length
            if length < SAMPLE_ROWS:
                self._short += 1
            elif hits < SAMPLE_AGREEMENT * length:
                self._foreign.add(f"sample {name!r} ({hits} of {length} rows)")
        self._waiting, self._waiting_rows = [], 0
        self._rows += len(right)
        self._right += int(right[:, now].sum())
        others = torch.arange(len(OFFSETS)) != now
        telling = (windows[:, others] != windows[:, now : now + 1]).all(dim=1)
        self._telling += (telling[:, None] & (windows != OUTSIDE)).sum(dim=0)
        self._telling_right += (telling[:, None] & right).sum(dim=0)

    def _given(self, states: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        """[rows, offsets] bool: does the state give that token? In float32, a piece of the head at a time."""
        vocab_size = self._vocab_size
        x = normed_rows(states, self._parts, normed=self._point == "norm")  # [rows, H]
        best, total = torch.full((len(x), 1), float("-inf")), torch.zeros(len(x), 1)
        for piece in logit_pieces(x, self._parts, vocab_size):  # [rows, piece]
            best = torch.maximum(best, piece.amax(dim=-1, keepdim=True))
            total += piece.sum(dim=-1, keepdim=True)
        logits = token_logits(x, windows, self._parts, vocab_size)
        height = best - total / vocab_size  # of the largest logit above the mean one
        return (height > 0) & (best - logits <= NEAR_TIE * height)  # a row of NaN, or a flat one, gives nothing

    def _check(self, verdict: Verdict, value: str, sentence: str) -> Check:
        threshold = f"at least {AGREEMENT:.0%} of greedy tokens, best at offset 0"
        return Check(name="final_state", verdict=verdict, value=value, threshold=threshold, sentence=sentence)


def final_obstacle(manifest: Manifest, parts: FinalStateParts) -> str:
    """Why a dump's final state cannot be judged with these parts; empty where it can."""
    target, point = manifest.target, manifest.spec.final
    if wrong := obstacle(parts, vocab_size=target.vocab_size, hidden_size=target.hidden_size):
        return wrong
    if point not in ("norm", f"layers.{target.num_layers - 1}"):
        return f"`{point}` is not the target's final state: expected norm or layers.{target.num_layers - 1}"
    return ""


def share_of_rows(start: int, stop: int, *, of: int, most: int, least: int) -> torch.Tensor:
    """Indices of range(start, stop), evenly spread: a part's share where `most` of `of` rows of a dump are judged, and
    at least `least` of every part."""
    share = -(-(stop - start) * min(most, of) // of)  # ceil
    return spread(start, stop, max(share, least))
