"""Names of vLLM, llama.cpp and Ollama, and what stands for them here.

Names in the column *here* are looked up in the parser, the routes and the fields: a table cannot name what is not
there.  An option of vLLM that Slotwise has by the same name is found, not written down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from docs.generate import names
from docs.generate.markdown import code, table

NONE = "–"
CODE = re.compile(r"`([^`]+)`")
ENVIRONMENT = ("SLOTWISE_API_KEY", "SLOTWISE_ADMIN_API_KEY", "XDG_CACHE_HOME", "HF_HOME", "HF_TOKEN")


class Elsewhere(NamedTuple):
    """A name that another server has."""

    there: str  # one or several, as users write them
    here: str  # what stands for it, in sentences with `names`; empty: nothing
    note: str = ""  # what differs


VLLM_OPTIONS = (  # options of `vllm serve`; those that Slotwise has by the same name need no `here`
    Elsewhere("--model", "The first argument, `MODEL`", "Without one the built-in model is served."),
    Elsewhere("--host", "", "This machine only (127.0.0.1) unless it is given; vLLM listens on all addresses."),
    Elsewhere("--port", ""),
    Elsewhere("--api-key", "", "Each key is a tenant. `VLLM_API_KEY` is `SLOTWISE_API_KEY`. `/metrics` and `/version` "
              "need a key, too."),
    Elsewhere("--served-model-name", ""),
    Elsewhere("--chat-template", "", "A file, not the template itself."),
    Elsewhere("--dtype", "", "A CPU computes in bfloat16 and float32, and half is bfloat16 there."),
    Elsewhere("--quantization", "", "Quantizes weights as they are loaded; it names no format of a checkpoint."),
    Elsewhere("--kv-cache-dtype", ""),
    Elsewhere("--max-model-len", "", "The longest sequence, prompt and output together."),
    Elsewhere("--max-num-seqs", "", "64 by default."),
    Elsewhere("--max-num-batched-tokens", "", "By default from the measured time of a step."),
    Elsewhere("--enable-chunked-prefill", "`--prefill`", "Chunked by default."),
    Elsewhere("--long-prefill-token-threshold", ""),
    Elsewhere("--scheduling-policy", "", "More policies than fcfs and priority."),
    Elsewhere("--block-size", "", "64 tokens by default."),
    Elsewhere("--gpu-memory-utilization", "", "On a CPU a share of the machine's memory."),
    Elsewhere("--kv-cache-memory-bytes", "", "Also `--kv-cache-memory`."),
    Elsewhere("--enable-prefix-caching", "", "Requests with different keys do not share blocks."),
    Elsewhere("--kv-offloading-size", "", "On a GPU."),
    Elsewhere("--seed", ""),
    Elsewhere("--stream-interval", ""),
    Elsewhere("--allowed-origins", "", "A browser page of any other site is refused, not only without CORS headers."),
    Elsewhere("--otlp-traces-endpoint", "", "OTLP over HTTP."),
    Elsewhere("--shutdown-timeout", "", "30 seconds by default."),
    Elsewhere("--disable-log-stats", "", "A line every ten seconds, only under load."),
    Elsewhere("--enable-log-requests", "", "A line at the end of each request, without its text."),
    Elsewhere("--max-log-len", "", "Without it no text is logged; with it, that many characters of the prompts."),
    Elsewhere("--disable-uvicorn-access-log", "`--access-log`", "No access log by default."),
    Elsewhere("--generation-config", ""),
    Elsewhere("--override-generation-config", ""),
    Elsewhere("--pooler-config", "`pooling_type` (LAST, MEAN) and `normalize`; one server generates and embeds."),
    Elsewhere("--config", ""),
    Elsewhere("--root-path", ""),
    Elsewhere("--ssl-certfile", ""),
    Elsewhere("--tokenizer", "", "The checkpoint's own."),
    Elsewhere("--revision", "", "The newest revision is downloaded."),
    Elsewhere("--download-dir", "The environment variable `HF_HOME`"),
    Elsewhere("--trust-remote-code", "", "Code of a checkpoint is never run."),
    Elsewhere("--tensor-parallel-size", ""),
    Elsewhere("--pipeline-parallel-size", ""),
    Elsewhere("--enable-expert-parallel", "", "Within the processes of `--tensor-parallel-size`."),
    Elsewhere("--data-parallel-size", "", "`slotwise scale` starts several servers behind one address."),
    Elsewhere("--enable-lora", ""),
    Elsewhere("--lora-modules", "", "Folders of this machine."),
    Elsewhere("--max-loras", "", "Of one step; `--max-cpu-loras` bounds the adapters in memory."),
    Elsewhere("--max-lora-rank", ""),
    Elsewhere("--speculative-config", ""),
    Elsewhere("--enable-auto-tool-choice", "", "On by default if the model's format of calls is known."),
    Elsewhere("--tool-call-parser", "", "By default chosen from the chat template."),
    Elsewhere("--reasoning-parser", ""),
    Elsewhere("--enforce-eager", ""),
    Elsewhere("--cpu-offload-gb", ""),
)

VLLM_ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
    "/health", "/ping", "/version", "/metrics", "/load", "/v1/embeddings", "/v1/responses", "/v1/messages", "/score",
    "/rerank", "/pooling", "/classify", "/v1/audio/transcriptions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/sleep", "/wake_up", "/is_sleeping", "/invocations")

LLAMA_CPP = (
    Elsewhere("`-m model.gguf`", "The first argument, `MODEL`: the file"),
    Elsewhere("`-hf owner/name:Q4_K_M`", "The first argument, `MODEL`", "The same; without a quantization, the "
              "repository's safetensors."),
    Elsewhere("`--alias`", "`--served-model-name`"),
    Elsewhere("`--host`, `--port`", "`--host` and `--port`", "Port 8000 by default, not 8080."),
    Elsewhere("`--api-key`", "`--api-key`", "Each key is a tenant."),
    Elsewhere("`--api-key-file`", "The environment variable `SLOTWISE_API_KEY`", "Keys separated by commas."),
    Elsewhere("`--ctx-size`", "`--max-model-len`", "The longest single request; `--kv-cache-memory` sizes the cache "
              "that all requests share."),
    Elsewhere("`--parallel`", "`--max-num-seqs`"),
    Elsewhere("`--cont-batching`", "`--batching`", "Continuous by default."),
    Elsewhere("`--batch-size`", "`--max-num-batched-tokens`", "`--batch-size` is the size of a static batch here."),
    Elsewhere("`--predict`", "The field `max_tokens`"),
    Elsewhere("`--threads`", "`--cpu-threads`"),
    Elsewhere("`--n-gpu-layers`", "`--device`", "Layers are not split between a GPU and the CPU; "
              "`--tensor-parallel-size` divides a model among GPUs."),
    Elsewhere("`--cache-type-k`, `--cache-type-v`", "`--kv-cache-dtype`", "The same type for keys and values."),
    Elsewhere("`--chat-template-file`", "`--chat-template`", "Always Jinja."),
    Elsewhere("`--metrics`", "`/metrics`", "Always on; the metrics have vLLM's names."),
    Elsewhere("`--slots`, `/slots`", "`/timeline` and `/events`", "The batch step by step, as a page and as lines."),
    Elsewhere("`/completion`", "`/v1/completions`", "`n_predict` is `max_tokens`, `repeat_penalty` is "
              "`repetition_penalty`."),
    Elsewhere("`/tokenize`, `/detokenize`", "`/tokenize` and `/detokenize`", "The text is in `prompt`, not in "
              "`content`."),
    Elsewhere("`/apply-template`", "`/tokenize` with `messages`", "Token ids, not text."),
    Elsewhere("`cache_prompt`", "`--enable-prefix-caching`", "On by default, for all requests of a key."),
    Elsewhere("`--grammar`, `--json-schema`", "The fields `guided_grammar` and `guided_json`", "Per request; grammars "
              "in Lark's syntax, too."),
    Elsewhere("`--lora`", "`--enable-lora` and `--lora-modules`", "In the format of PEFT, not GGUF; requests name it."),
    Elsewhere("`--model-draft`", "`--speculative-config`", "Its key `model`, with the method draft_model."),
    Elsewhere("`--mmproj`", "", "Text only."),
    Elsewhere("`/embedding`", "`/v1/embeddings`", "OpenAI's body."),
    Elsewhere("`/infill`", "`/v1/completions` with `suffix`", "`input_prefix` is `prompt`, `input_suffix` is `suffix`; "
              "for models with tokens for it."),
    Elsewhere("`/props`", "`/v1/models` and `/admin/scheduling`", "The context length and the slots."),
    Elsewhere("`/rerank`", "", "No supported family has a head for it."),
)

OLLAMA = (
    Elsewhere("`ollama serve`", "`slotwise serve`", "One server has one model at a time, loaded at its start; "
              "`/v1/load_model` changes it."),
    Elsewhere("`ollama run`", "`slotwise chat`", "Loads the model in its own process; needs no server."),
    Elsewhere("`ollama pull`", "", "A hub id that is served is downloaded first."),
    Elsewhere("`ollama ps`", "`slotwise top`", "Slots, queue, cache and rates."),
    Elsewhere("Modelfile: `TEMPLATE`", "`--chat-template`", "Jinja, not Go's templates."),
    Elsewhere("Modelfile: `FROM`", "The first argument, `MODEL`: a folder, a GGUF file or a hub id", "Also a GGUF file "
              "of Ollama's own store, whose name is a digest."),
    Elsewhere("Modelfile: `ADAPTER`", "`--enable-lora` and `--lora-modules`", "In the format of PEFT; requests name "
              "it."),
    Elsewhere("`OLLAMA_HOST`", "`--host` and `--port`", "Port 8000 by default, not 11434."),
    Elsewhere("`OLLAMA_ORIGINS`", "`--allowed-origins`"),
    Elsewhere("`OLLAMA_MODELS`", "The environment variable `HF_HOME`", "The hub's own cache of models."),
    Elsewhere("`OLLAMA_NUM_PARALLEL`", "`--max-num-seqs`"),
    Elsewhere("`OLLAMA_MAX_QUEUE`", "`--max-num-queued-reqs`", "By default from the measured rate of starts."),
    Elsewhere("`OLLAMA_CONTEXT_LENGTH`, `num_ctx`", "`--max-model-len`", "Per server, not per request."),
    Elsewhere("`OLLAMA_KV_CACHE_TYPE`", "`--kv-cache-dtype`"),
    Elsewhere("`OLLAMA_KEEP_ALIVE`, `keep_alive`", "`/sleep` and `/wake_up`", "The model stays loaded until it is "
              "told to sleep."),
    Elsewhere("`OLLAMA_MAX_LOADED_MODELS`", "", "Start one server for each model."),
    Elsewhere("`/api/generate`", "`/v1/completions`", "OpenAI's body; streams are server-sent events, and only with "
              "`stream`."),
    Elsewhere("`/api/chat`", "`/v1/chat/completions`", "OpenAI's body; the same streams."),
    Elsewhere("`/api/tags`", "`/v1/models`"),
    Elsewhere("`/api/version`", "`/version`"),
    Elsewhere("`options`", "Fields of the body", "`num_predict` is `max_tokens`, `repeat_penalty` is "
              "`repetition_penalty`; `temperature`, `top_k`, `top_p`, `min_p`, `seed` and `stop` have the same names."),
    Elsewhere("`/api/embed`", "`/v1/embeddings`", "OpenAI's body and response."),
    Elsewhere("`/api/ps`, `/api/show`", "`/v1/models`"),
    Elsewhere("`/api/pull`, `/api/create`, `/api/delete`", "", "`/v1/load_model` loads a model of this machine."),
)

FOREIGN = frozenset({  # names of the others that notes mention
    "VLLM_API_KEY", "n_predict", "repeat_penalty", "content", "num_predict", "input_prefix", "input_suffix"})


def vllm_options() -> str:
    """Returns the options of `vllm serve` that are the same here, and what stands for each of the others."""
    same = [code(option.there) for option in VLLM_OPTIONS if _is_same(option)]
    rows = [Elsewhere(code(option.there), _stands_for(option), option.note)
            for option in VLLM_OPTIONS if not _is_same(option)]
    return f"The same: {', '.join(same)}.\n\n{_table('`vllm serve`', rows)}"


def vllm_routes() -> str:
    """Returns which routes of vLLM's server are there, and which are answered with 404."""
    there = [code(path) for path in VLLM_ROUTES if names.has(path)]
    absent = [code(path) for path in VLLM_ROUTES if not names.has(path)]
    return f"The same: {', '.join(there)}.\n\nNot there (404): {', '.join(absent)}."


def llama_cpp() -> str:
    """Returns what stands for options, routes and fields of llama.cpp's server."""
    return _table("`llama-server`", LLAMA_CPP)


def ollama() -> str:
    """Returns what stands for commands, variables, routes and fields of Ollama."""
    return _table("Ollama", OLLAMA)


def check(text: str) -> str:
    """Returns `text`, in which every name in code is one of ours, or one of the others' that is listed.

    Raises:
        KeyError: there is no such option, route, command, field or variable.
    """
    for name in CODE.findall(text):
        if name not in ENVIRONMENT and name not in FOREIGN and name != "MODEL" and not names.has(name):
            raise KeyError(name)
    return text


def _table(title: str, rows: Iterable[Elsewhere]) -> str:
    return table((title, "here", "what differs"), [
        (there, f"{check(here)}." if here else NONE, check(note) or "Nothing.") for there, here, note in rows])


def _is_same(option: Elsewhere) -> bool:
    return names.has(option.there) and not option.note


def _stands_for(option: Elsewhere) -> str:
    if names.has(option.there):
        return "The same name"
    return "Accepted where it changes nothing" if names.is_accepted(option.there) else option.here
