"""The contract: all that serving must match. It travels with the drafter as contract.json."""

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3.capture import CaptureSpec
from eagle3.digests import canonical_json, sha256_bytes
from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from eagle3.errors import Eagle3Error, first_fault

CONTRACT_NAME = "contract.json"
CONTRACT_VERSION: Final = 2
_SINCE_2 = frozenset({"report_check_set", "report_thresholds_sha256"})

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ContractError(Eagle3Error, ValueError):
    """A contract that cannot be read, or that does not fit the weights beside it."""


class NormFlags(BaseModel):
    """The second silent axis: where the drafter normalises. Defaults are what SGLang's Llama drafter does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class DrafterContract(BaseModel):
    """What the drafter was trained on, in canonical words, and the digest of the weights that it speaks for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1, 2] = CONTRACT_VERSION
    architecture: str = Field(examples=["LlamaForCausalLMEagle3"])
    capture: CaptureSpec = Field(description="`capture.aux` is the order in which fc expects its slots")
    target: TargetIdentity
    tokenizer: TokenizerIdentity
    dump_uri: str
    dump_sha256: Sha256 = Field(description="Manifest digest of the training dump")
    report_sha256: Sha256 = Field(description="Digest of the evidence report that the dump passed")
    report_check_set: int | None = Field(
        default=None, description="Version of the check set that the report passed; see `eagle3.evidence.standing`"
    )
    report_thresholds_sha256: Sha256 | None = Field(default=None, description="Digest of the thresholds it passed")
    draft_vocab_size: int = Field(gt=0)
    vocab_map_sha256: Sha256 = Field(description="sha256 over the draft vocabulary's target ids")
    norm: NormFlags = NormFlags()
    weights_sha256: Sha256 = Field(description="Merkle digest of the drafter's named tensors, the same in every form")

    @model_validator(mode="after")
    def _check_version(self) -> Self:
        if self.schema_version == 1 and (self.report_check_set, self.report_thresholds_sha256) != (None, None):
            raise ContractError(
                "a contract of version 1 has no check set and thresholds: its digest would not cover them"
            )
        return self

    def canonical(self) -> bytes:
        """Canonical JSON; a contract of version 1 keeps its bytes, and so its digest."""
        return canonical_json(self.model_dump(mode="json", exclude=set(_SINCE_2) if self.schema_version == 1 else None))

    def digest(self) -> str:
        """sha256 of the canonical JSON. It covers the weights' digest, so a copied contract proves nothing."""
        return sha256_bytes(self.canonical())

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> Self:
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            field, what = first_fault(error)
            if field == "schema_version":
                raise ContractError(
                    f"{where}: a contract of schema version {error.errors()[0]['input']!r}; this software reads "
                    f"versions 1 and {CONTRACT_VERSION}. Update it, or export the drafter again"
                ) from None
            raise ContractError(f"{where}: not a valid contract: {field}: {what}") from None
