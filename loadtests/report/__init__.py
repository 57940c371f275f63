"""Reports of replays: figures, verdicts, pages."""
