"""Moonpool for Hugging Face `transformers`: wrap a causal LM, and its prompts' KV cache is shared by all processes.

    import moonpool
    from moonpool.engines.transformers import PrefixCache

    cache = PrefixCache(model, moonpool.connect())
    output = cache.generate(input_ids, max_new_tokens=32)
    print(cache.last)

Needs torch and transformers 5: `pip install 'moonpool[demo]'`.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"moonpool.engines.transformers needs torch and transformers ({error}): pip install 'moonpool[demo]'"
    ) from error

from moonpool.engines.transformers.cache import Prefill, PrefixCache
from moonpool.engines.transformers.layout import LAYOUT, LAYOUT_VERSION, BlockLayout
from moonpool.engines.transformers.report import Report
from moonpool.engines.transformers.support import UnsupportedModel

__all__ = ["LAYOUT", "LAYOUT_VERSION", "BlockLayout", "Prefill", "PrefixCache", "Report", "UnsupportedModel"]
