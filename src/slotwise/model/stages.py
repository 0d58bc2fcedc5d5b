"""Which layers each stage of a model holds.

Stages read about as many bytes of weights for a token each, the first with the head's among them, so that none of them
waits long for another:

    4 layers, the head as large as two    | head 0 | 1 2 3 |
"""

from __future__ import annotations

from slotwise.kernels.group import Stage
from slotwise.model.config import ModelConfig
from slotwise.model.errors import CheckpointError


def layers_of(config: ModelConfig, stage: Stage) -> range:
    """The layers of a stage, at least one.

    Raises:
        CheckpointError: the model has fewer layers than there are stages.
    """
    number, count = config.num_layers, stage.total
    if count == 1:
        return range(number)
    if number < count:
        raise CheckpointError(f"pipeline_parallel_size {count}: the model has {number} layers, fewer than stages: "
                              "lower it")
    head = config.vocab_size * config.hidden_size / (config.layer_weights / number)  # in layers
    ends = [0]
    for index in range(1, count):
        even = round(index * (number + head) / count - head)
        ends.append(min(max(even, ends[-1] + 1), number - (count - index)))
    return range(*[*ends, number][stage.number : stage.number + 2])
