"""How large a model's KV cache is, and whether moving it beats computing it: from its config.json alone."""

from __future__ import annotations

from moonpool.calc.architectures import MODEL_TYPES, read_model
from moonpool.calc.bandwidths import Bandwidth, parse_bandwidth
from moonpool.calc.config import ModelConfigError
from moonpool.calc.layers import AttentionLayers, LatentLayers, Model, StateLayers
from moonpool.calc.report import Report, calculate

__all__ = [
    "MODEL_TYPES",
    "AttentionLayers",
    "Bandwidth",
    "LatentLayers",
    "Model",
    "ModelConfigError",
    "Report",
    "StateLayers",
    "calculate",
    "parse_bandwidth",
    "read_model",
]
