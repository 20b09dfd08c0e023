"""Settings that must stand before torch is imported: one thread, no model hub."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hypothesis import settings

settings.register_profile("kvbaton", deadline=None, print_blob=True, max_examples=50)
settings.load_profile("kvbaton")
