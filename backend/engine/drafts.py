"""The draft tokens of a step: who has some, and what became of them. Pure bookkeeping."""

from tritium.backend.config import SpeculativeConfig
from tritium.backend.engine.block_manager import BlockManager
from tritium.backend.engine.sequence import ScheduledSequence, Sequence
from tritium.backend.engine.speculative import NgramProposer


class Drafts:
    """Lets sequences compute what may follow, too, with what a step leaves of budget and blocks.

    Args:
        config: How drafts are made; None: there are none.
        block_manager: Gives the blocks that a draft needs, none of those that are promised.
    """

    def __init__(self, config: SpeculativeConfig | None, block_manager: BlockManager) -> None:
        self._config = config
        self._block_manager = block_manager
        self.num_tokens = 0  # that were verified
        self.num_accepted_tokens = 0  # of them

    def add_proposer(self, sequence: Sequence) -> None:
        """Give a new sequence what makes its drafts, if it may have some."""
        request = sequence.request
        if self._config and request.speculative and not request.needs_history:
            sequence.proposer = NgramProposer(self._config)

    def may_follow(self, sequence: Sequence, num_running: int) -> bool:
        """Whether the next step may try a draft of the sequence, as far as is known now."""
        return bool(
            self._config
            and num_running <= self._config.disable_by_batch_size
            and sequence.proposer
            and not sequence.proposer.is_paused(sequence.num_tokens)
            and sequence.num_output_tokens >= sequence.request.min_tokens
        )

    def add_to(self, batch: list[ScheduledSequence], budget: int, num_running: int) -> None:
        """Lengthen a step's sequences by drafts, by at most `budget` tokens.

        Prompts need no drafts, and where steps overlap one can't follow on an unknown token.
        """
        for i, scheduled in enumerate(batch):
            sequence, request = scheduled.sequence, scheduled.sequence.request
            if scheduled.num_new_tokens > 1 or sequence.num_pending_tokens or not scheduled.samples:
                continue
            if not sequence.proposer or not self.may_follow(sequence, num_running):
                continue
            # Behind the draft comes one token more, of which nothing is computed.
            limit = min(budget, request.max_tokens - sequence.num_output_tokens - 1)
            draft = sequence.proposer.propose(sequence.token_ids, limit)
            if draft and self._block_manager.allocate(sequence, 1 + len(draft)):
                batch[i] = scheduled.with_draft(draft)
                budget -= len(draft)

    def take_back(self, scheduled: ScheduledSequence, num_dropped: int, num_computed: int) -> None:
        """Forget what a step has computed of a draft that was wrong.

        Args:
            num_dropped: Of the tokens that it yielded, the last ones.
            num_computed: Tokens of the sequence that are right, without the dropped ones.
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
