"""`moonpool demo --engine vllm`: two vLLM engines over one pool, and one without it that says what is right.

In the order of the journey: `settings` (what an engine's process is told, and tells), `engine` (what that process
does), `tamper` (what must not go unnoticed), `run` (all of it in order), `table`. Only `engine` imports vLLM.
"""

from __future__ import annotations
