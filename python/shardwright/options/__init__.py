"""The user's options. This folder imports only the engine."""
