"""Selectors: which reused rows are computed afresh. One part, one file, one frozen dataclass."""
