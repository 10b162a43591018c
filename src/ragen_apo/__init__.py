"""Multi-turn A*-PO: reinforcement learning for language-model agents with one rollout per task."""

__version__ = "0.2.0"
