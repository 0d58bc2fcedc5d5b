"""The benchmark of encoders: the cross-encoder that it writes, on Slotwise and on transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.encoders import MAKERS, SCORE, SLOTWISE, inputs_of, write_cross_encoder
from support import checkpoints

from slotwise.text.tokenizer import Tokenizer


def test_the_cross_encoder_has_the_layers_of_the_encoder_and_scores_pairs(tmp_path: Path) -> None:
    from transformers import (
        BertForSequenceClassification,  # which imports Triton: `support.cuda_device` has to be first
    )

    encoder = checkpoints.make("bert", tmp_path, tokenizer=True, kind="Model")
    (folder := tmp_path / "ranking").mkdir()
    write_cross_encoder(encoder, folder)
    theirs, loading = BertForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    layers = theirs.bert.encoder.state_dict()
    assert all(torch.equal(weight, layers[name.removeprefix("encoder.")]) for name, weight in
               checkpoints.reference_model(encoder, "float32", "AutoModel").state_dict().items()
               if name.startswith("encoder."))
    pairs = [(query[:40], document[:40]) for query, document in inputs_of(SCORE)["sentences"][:3]]
    read, _ = MAKERS[SLOTWISE](str(folder), SCORE)
    tokenizer = Tokenizer.load(folder)
    with torch.inference_mode(), checkpoints.one_thread():
        wanted = [float(theirs(torch.tensor([tokenizer.encode_pair(*pair)])).logits[0, 0].sigmoid()) for pair in pairs]
    assert [score for (score,) in read(pairs)] == pytest.approx(wanted, abs=1e-5)
