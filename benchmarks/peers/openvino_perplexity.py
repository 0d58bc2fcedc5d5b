"""Reads texts with a model exported for OpenVINO: FOLDER, texts on stdin.

Runs in the environment of OpenVINO (`benchmarks/peers/install.sh` installs it), and imports nothing of Slotwise.
stdin is a JSON list of lists of token ids; the last line of stdout is {"version", "nats", "greedy"}: nats over all
tokens but each text's first, and the most probable token at each of these places.  The folder is exported with

    optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past --weight-format int4 \\
        --group-size 64 FOLDER
"""

from __future__ import annotations

import json
import sys

import openvino
import torch
from optimum.intel import OVModelForCausalLM


def main() -> None:
    """Read all texts, one after another."""
    model = OVModelForCausalLM.from_pretrained(sys.argv[1], compile=True)
    nats, greedy = 0.0, []
    for ids in json.load(sys.stdin):
        text = torch.tensor([ids])
        logits = model(input_ids=text, attention_mask=torch.ones_like(text)).logits[0, :-1].float()
        nats -= float(logits.log_softmax(-1).gather(1, text[0, 1:, None]).double().sum())
        greedy += logits.argmax(-1).tolist()
    print(json.dumps({"version": openvino.__version__, "nats": nats, "greedy": greedy}))


if __name__ == "__main__":
    main()
