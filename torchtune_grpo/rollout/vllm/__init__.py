"""vLLM as the rollout engine."""

from torchtune_grpo.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
