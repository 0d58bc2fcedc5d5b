"""Sampling parameters of the offline API, under the path that vLLM's users know."""

from __future__ import annotations

from slotwise.offline.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
