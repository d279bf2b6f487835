"""Naive versions of what the engine promises, in a few lines each: slow, plain, and the law of the tests."""
