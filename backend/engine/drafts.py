"""The draft tokens of a step: which sequences get some, which are accepted. Pure bookkeeping."""

from tritium.backend.config import SpeculativeConfig
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.engine.speculative import NgramProposer


class Drafts:
    """Adds draft tokens to a step's sequences, from the budget and blocks that the step leaves.

    Args:
        config: How drafts are made; None: no drafts.
        block_manager: Allocates the blocks that a draft needs; promised blocks are not used.
    """

    def __init__(self, config: SpeculativeConfig | None, block_manager: BlockManager) -> None:
        self._config = config
        self._block_manager = block_manager
        self.num_tokens = 0  # verified draft tokens
        self.num_accepted_tokens = 0

    def add_proposer(self, sequence: Sequence) -> None:
        """Give a new sequence a proposer, if it may have drafts."""
        request = sequence.request
        if self._config and request.speculative and not request.needs_history:
            sequence.proposer = NgramProposer(self._config)

    def may_follow(self, sequence: Sequence, num_running: int) -> bool:
        """Whether the next step may include a draft of the sequence, as far as is known now."""
        return bool(
            self._config
            and num_running <= self._config.disable_by_batch_size
            and sequence.proposer
            and not sequence.proposer.is_paused(sequence.num_tokens)
            and sequence.num_output_tokens >= sequence.request.min_tokens
        )

    def add_to(self, batch: list[ScheduledSequence], budget: int, num_running: int) -> None:
        """Extend a step's sequences by drafts of at most `budget` tokens together.

        Prompts get no drafts. Neither do sequences with pending tokens, where steps overlap: a
        draft can't follow on an unknown token.
        """
        for i, scheduled in enumerate(batch):
            sequence, request = scheduled.sequence, scheduled.sequence.request
            if scheduled.num_new_tokens > 1 or sequence.num_pending_tokens or not scheduled.samples:
                continue
            if not sequence.proposer or not self.may_follow(sequence, num_running):
                continue
            # The step samples one token after the draft, whose KV it does not compute.
            limit = min(budget, request.max_tokens - sequence.num_output_tokens - 1)
            draft = sequence.proposer.propose(sequence.token_ids, limit)
            if draft and self._block_manager.allocate(sequence, 1 + len(draft)):
                end = scheduled.end + len(draft)
                batch[i] = scheduled._replace(end=end, draft_token_ids=tuple(draft))
                budget -= len(draft)

    def take_back(self, scheduled: ScheduledSequence, num_dropped: int, num_computed: int) -> None:
        """Count a step's draft, and give back the blocks of its rejected tokens.

        Args:
            num_dropped: Sampled tokens that were not appended to the sequence.
            num_computed: Computed tokens of the sequence, without those of the rejected draft.
        """
        sequence, draft_token_ids = scheduled.sequence, scheduled.draft_token_ids
        if not draft_token_ids or not sequence.proposer:
            return
        num_accepted = len(draft_token_ids) - num_dropped
        self.num_tokens += len(draft_token_ids)
        self.num_accepted_tokens += num_accepted
        sequence.proposer.observe(sequence.num_tokens, num_accepted)
        sequence.num_computed_tokens = num_computed
        self._block_manager.trim(sequence, num_computed)
