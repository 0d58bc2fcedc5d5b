"""ONNX Runtime GenAI's engine: ONNXRUNTIME/bin/python benchmarks/peers/run_onnxruntime.py FOLDER.

The folder is written by `python -m onnxruntime_genai.models.builder -i CHECKPOINT -o FOLDER -p int4 -e cpu -c CACHE`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from importlib import metadata

from same_requests import CONTEXT, Engine, main

EVENTS = 256  # that one call of the engine may report


class OnnxRuntime:
    name = "onnxruntime"

    def __init__(self, folder: str) -> None:
        import onnxruntime_genai

        self._package = onnxruntime_genai
        self.version = metadata.version("onnxruntime-genai")
        self._model = onnxruntime_genai.Model(folder)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> int:
        import numpy

        package, engine, tokens = self._package, self._package.Engine(self._model), 0
        requests = []
        for prompt, length in zip(prompts, lengths, strict=True):
            options = package.RequestOptions()
            options.set_max_session_tokens(CONTEXT)
            request = engine.create_request(options=options)
            turn = package.TurnOptions(request)
            turn.set_do_sample(False)
            turn.set_min_generated_tokens(length)  # an end token is not drawn before
            turn.set_max_generated_tokens(length)
            request.begin_turn(numpy.array(prompt, dtype=numpy.int32), turn)
            requests.append(request)
        events = engine.create_event_buffer(EVENTS)
        while engine.has_pending_requests():
            for event in engine.run(events):
                if event.flags & package.EngineEventFlags.FAILED:
                    raise SystemExit(f"onnxruntime: a request failed: {event.error_code}")
                tokens += bool(event.flags & package.EngineEventFlags.TOKEN)
        for request in requests:
            request.close()
        return tokens


@contextlib.contextmanager
def start(asked: argparse.Namespace) -> Iterator[Engine]:
    yield OnnxRuntime(asked.model)


if __name__ == "__main__":
    main(start, __doc__)
