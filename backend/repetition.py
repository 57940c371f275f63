"""The loop guard: answers that only repeat themselves are ended, before they hold KV for long."""

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RepetitionDetection(BaseModel):
    """Whether an answer ends in a loop: a pattern of tokens, `min_count` times on end.

    The fields are those of vLLM's sampling parameter of this name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_pattern_size: int = Field(0, ge=0, le=1024)  # tokens; 0: never
    min_pattern_size: int = Field(1, ge=1)
    min_count: int = Field(2, ge=2)

    @model_validator(mode="after")
    def _check(self) -> "RepetitionDetection":
        if self.min_pattern_size > self.max_pattern_size > 0:
            raise ValueError(
                f"min_pattern_size ({self.min_pattern_size}) should be at most "
                f"max_pattern_size ({self.max_pattern_size})"
            )
        return self

    def found_in(self, token_ids: list[int], start: int) -> bool:
        """Whether the tokens from `start` on end in a loop."""
        for size in range(self.min_pattern_size, self.max_pattern_size + 1):
            span = size * self.min_count
            if span > len(token_ids) - start:
                return False
            # What repeats with this period equals itself that much further on. Mostly the last
            # token alone does not, which spares the copies.
            if (
                token_ids[-1] == token_ids[-1 - size]
                and token_ids[-span:-size] == token_ids[-span + size :]
            ):
                return True
        return False
