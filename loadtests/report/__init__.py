"""What a replay measured: figures, verdicts, and a page of them."""
