"""What a person sees of a run: the account of steps, the verdict on it, and trackers. docs/observing.md."""
