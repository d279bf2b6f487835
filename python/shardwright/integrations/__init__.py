"""Seams to other libraries: one module a library, imported by name; none of them is needed to run."""
