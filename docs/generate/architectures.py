"""The table of `transformers`' causal models, from `docs/architectures.json` and the table of parts that are missing.

`python -m docs.generate.architectures` writes that file anew: it gives Slotwise the config of each class in
`MODEL_FOR_CAUSAL_LM_MAPPING`, as transformers fills it in by default, with `is_decoder` where it has that field.
"""

from __future__ import annotations

import json
from typing import Any

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, escaped, table

from slotwise.compute.model.family_table import FAMILIES, configure
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.unserved_families import GROUPS
from slotwise.errors import CheckpointError

FILE = ROOT / "docs" / "architectures.json"
SERVED = ""  # the message of a class that is served
WHERE = "config.json"


def survey() -> dict[str, Any]:
    """Returns the version of transformers, and of each model type its class, and the message that refuses it."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = [{"model_type": model_type, "class": name, "message": _message(model_type, name)}
            for model_type, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())]
    return {"transformers": transformers.__version__, "rows": rows}


def _message(model_type: str, name: str) -> str:
    """What Slotwise says to a config of this type, without the list of what is served; SERVED where it reads it."""
    values: dict[str, Any] = {}
    if name in FAMILIES:
        from transformers import AutoConfig

        values = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
        if "is_decoder" in values:  # of encoders that may be decoders
            values["is_decoder"] = True
    try:
        configure(Fields(values | {"architectures": [name], "model_type": model_type}, WHERE))
    except CheckpointError as error:
        return str(error).removeprefix(f"{WHERE}: ").split("; these are:")[0]
    return SERVED


def causal_models() -> str:
    """Returns how many there are and how many are served, and a row for each: in each group of classes, by type."""
    content = json.loads(FILE.read_text())
    rows = content["rows"]
    served = sum(row["message"] == SERVED for row in rows)
    head = (f"transformers {content['transformers']} has {len(rows)} types of causal models; {served} are served, and "
            f"{len(rows) - served} are refused.")
    return head + "\n\n" + table(("`model_type`", "class", "what it is", "what becomes of it"), [
        (code(row["model_type"]), code(row["class"]), _group(row["class"]),
         "**Served.**" if row["message"] == SERVED else f"Refused: {escaped(_shortened(row))}.") for row in rows])


def _group(name: str) -> str:
    return next((group for group, members in GROUPS.items() if name in members), next(iter(GROUPS)))


def _shortened(row: dict[str, str]) -> str:
    """The message without the class, which the row names."""
    return row["message"].removeprefix(f"architecture {row['class']} is not supported: ")


if __name__ == "__main__":
    FILE.write_text(json.dumps(survey(), indent=1) + "\n")
