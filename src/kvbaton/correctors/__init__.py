"""Correctors: what is added to a reused KV. One part, one file, one frozen dataclass."""
