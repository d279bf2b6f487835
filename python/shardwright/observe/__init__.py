"""Observation of a run by a person: the account of steps, the verdict on it, and trackers. docs/observing.md."""
