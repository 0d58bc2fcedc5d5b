"""Answers prompts with OpenVINO GenAI's continuous batching: FOLDER SLOTS CONTEXT.

Runs in the environment of OpenVINO, and imports nothing of Slotwise.  A line of stdin is a job, {"prompts", "users",
"max_tokens"}; a line of stdout its result, {"seconds", "answers": [{"first", "last", "ids"}, ...]}.  The users of a job
send their next prompt when the last is answered; each loop below is one step of the pipeline.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

CACHE = 4  # GiB


def pipeline(folder: str, slots: int) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = CACHE, slots
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 2048, True
    scheduler.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {})


def answers(pipe: Any, job: dict[str, Any]) -> dict[str, Any]:
    config = pipe.get_config()
    config.max_new_tokens, config.do_sample = job["max_tokens"], False
    waiting, running = list(enumerate(job["prompts"]))[::-1], {}
    found: list[dict[str, Any]] = [{"first": 0.0, "last": 0.0, "ids": []} for _ in job["prompts"]]
    began = time.perf_counter()
    sent = {}
    while waiting or running:
        while waiting and len(running) < job["users"]:
            number, prompt = waiting.pop()
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            running[number] = pipe.add_request(number, ids, config)
            sent[number] = time.perf_counter()
        pipe.step()
        now = time.perf_counter()
        for number, handle in [*running.items()]:
            while handle.can_read():
                for output in handle.read().values():
                    answer = found[number]
                    answer["first"] = answer["first"] or now - sent[number]
                    answer["last"] = now - sent[number]
                    answer["ids"] += list(output.generated_ids)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[number]
    return {"seconds": time.perf_counter() - began, "answers": found}


def main() -> None:
    pipe = pipeline(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(answers(pipe, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
