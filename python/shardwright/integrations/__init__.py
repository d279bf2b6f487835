"""Integrations with other libraries, one module each, imported by name. None is needed at run time."""
