"""vLLM as the rollout engine."""

from torchtune_grpo.rollout.vllm.engine import VLLMEngine
from torchtune_grpo.rollout.vllm.server import VLLMServer

__all__ = ["VLLMEngine", "VLLMServer"]
