"""Integrations with other libraries, one module each. Import them by name; no other module needs them."""
