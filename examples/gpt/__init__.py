"""The parts of examples/train_gpt.py, one responsibility a module."""
