"""Processes that can be killed with all that they started, for rewards that run foreign code.

Nothing here imports torch: the processes start in milliseconds and hold nothing worth stealing.
"""

from torchtune_grpo.sandbox.code import CodeSandbox, Limits, SandboxError, Verdict
from torchtune_grpo.sandbox.server import ServerLost, ServerProcess
from torchtune_grpo.sandbox.wire import PeerGone, receive, send, send_bytes

__all__ = [
    "CodeSandbox",
    "Limits",
    "PeerGone",
    "SandboxError",
    "ServerLost",
    "ServerProcess",
    "Verdict",
    "receive",
    "send",
    "send_bytes",
]
