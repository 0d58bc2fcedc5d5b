"""All generated blocks, by name."""

from __future__ import annotations

from collections.abc import Callable

from docs.generate import coming_from, command_line, http, metrics, modules, policies, records, results, supported

BLOCKS: dict[str, Callable[[], str]] = {
    "commands": command_line.commands,
    "routes": http.routes,
    "bodies": http.bodies,
    "tier file": http.tier_file,
    "statuses": http.statuses,
    "metrics": metrics.metrics,
    "buckets": metrics.buckets,
    "plan": records.plan,
    "core events": records.core_events,
    "event log": records.entries,
    "reasons": records.reasons_of_refusals,
    "parts of a request": records.parts_of_a_request,
    "modules": modules.modules,
    "reliability": results.reliability,
    "beside vllm": results.beside_vllm,
    "beside vllm summary": results.beside_vllm_summary,
    "disciplines": results.disciplines,
    "static and continuous": results.static_and_continuous,
    "start": results.start,
    "roofline": results.roofline,
    "parts": results.parts,
    "quantized": results.quantized,
    "perplexity": results.perplexity,
    "stalls": results.stalls,
    "step times": results.step_times,
    "neighbours": results.neighbours,
    "observing": results.observing,
    "policies": policies.promises,
    "architectures": supported.architectures,
    "checkpoints": supported.checkpoints,
    "devices": supported.devices,
    "fields taken and refused": supported.fields,
    "served routes": supported.served_routes,
    "not there": supported.without,
    "vllm options": coming_from.vllm_options,
    "vllm routes": coming_from.vllm_routes,
    "llama cpp": coming_from.llama_cpp,
    "ollama": coming_from.ollama,
}
