"""A Hugging Face target: its numbers, the few tensors a drafter needs, its tokenizer, its identity, its states."""

from eagle3.target.files import TargetError
from eagle3.target.loading import quiet_transformers
from eagle3.target.target import Target

__all__ = ["Target", "TargetError", "quiet_transformers"]
