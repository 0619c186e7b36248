"""`moonpool demo`: the main job on real input. A transformer's KV cache goes through the store and back.

In the order of the journey: `prompts` (text to tokens), `model`, `node` (a daemon of its own), `worker` (what a
fresh process does), `tamper` (what must not go unnoticed), `compare`, `run` (all of it in order), `table`, `command`.
Only `model` and `worker` import torch, and they only in processes of their own. `vllm` is the like for vLLM engines.
"""

from __future__ import annotations
