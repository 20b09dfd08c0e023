"""May a segment be reused at all?"""

from kvbaton.gates.base import Always, ExactKey, Gate, Never, Verdict
from kvbaton.gates.entropy import Entropy, MessageEntropy
from kvbaton.gates.residual import Residual

__all__ = ["Always", "Entropy", "ExactKey", "Gate", "MessageEntropy", "Never", "Residual", "Verdict"]
