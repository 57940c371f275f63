"""The loop guard: ends answers that only repeat themselves, before they hold KV for long."""

from tritium.backend.config import RepetitionDetection


def ends_in_loop(token_ids: list[int], start: int, detection: RepetitionDetection) -> bool:
    """Whether the tokens from `start` on end in a loop."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > len(token_ids) - start:
            return False
        # A text that repeats with this period equals itself shifted by it. Comparing the last
        # token first avoids the copies in most cases.
        if (
            token_ids[-1] == token_ids[-1 - size]
            and token_ids[-span:-size] == token_ids[-span + size :]
        ):
            return True
    return False
