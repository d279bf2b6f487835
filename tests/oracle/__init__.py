"""Naive versions of the engine's promises, a few lines each: slow and plain, the law of the tests."""
