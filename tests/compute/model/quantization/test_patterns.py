"""Names and expressions of modules, from configs that may be hostile."""

from __future__ import annotations

import pytest

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import spellings
from slotwise.compute.model.quantization.patterns import MAX_NAMES, read_skipped, read_targets
from slotwise.errors import CheckpointError

UP = "model.layers.11.mlp.up_proj"
PLAIN, OF_PART, HEADLESS = map(spellings, ("LlamaForCausalLM", "Gemma3ForConditionalGeneration", "Qwen3Model"))


def targets(*names: str) -> Fields:
    return Fields({"ignore": list(names)}, "config.json")


@pytest.mark.parametrize(("name", "matches"), [
    ("model.layers.11.mlp.up_proj", True), ("model.layers.1.mlp.up_proj", False), ("up_proj", False),
    ("re:.*up_proj", True), ("re:.*up_proj$", True), ("re:up_proj", False), ("re:.*mlp.*", True), ("re:model.*", True),
    (r"re:model\.layers\.(1|11|20)\.mlp\..*", True), (r"re:model\.layers\.[0-9]\.mlp.*", False),
    (r"re:.*\.layers\.\d+\.(?:mlp|self_attn)\.(gate|up)_proj$", True), (r"re:^(?!.*self_attn).*$", True),
    (r"re:.*layers\.1{2}\..*", True), ("Linear", False)])
def test_targets_are_whole_names_or_expressions_from_the_start(name: str, matches: bool) -> None:
    assert read_targets(targets(name), "ignore", PLAIN)(UP) is matches


@pytest.mark.parametrize("name", [
    "model.language_model.layers.11.mlp.up_proj", "language_model.model.layers.11.mlp.up_proj", UP,
    r"re:model\.language_model\.layers\.11\..*", r"re:language_model\.model\.layers.*", r"re:.*language_model.*up_proj",
    r"re:^(?!.*vision_tower).*"])
def test_names_of_a_part_for_text_are_known_under_every_spelling(name: str) -> None:
    assert read_targets(targets(name), "ignore", OF_PART)(UP)
    assert not read_targets(targets(r"re:^(?!.*language_model).*", r"re:model\.layers"), "ignore", OF_PART)(UP)
    if not name.startswith("re:"):
        assert read_skipped(targets(name), OF_PART, "ignore")(UP) or name == UP


def test_other_spellings() -> None:
    assert read_targets(targets("language_model.lm_head"), "ignore", OF_PART)("lm_head")
    assert read_skipped(targets("language_model.lm_head"), OF_PART, "ignore")("lm_head")
    assert read_targets(targets(r"re:layers\.11"), "ignore", HEADLESS)(UP)
    assert read_targets(targets("layers.11.mlp.up_proj"), "ignore", PLAIN)(UP)
    assert not read_targets(targets(r"re:^(?!model\.layers\.11\.).*"), "ignore", PLAIN)(UP)


@pytest.mark.parametrize(("name", "matches"), [
    ("up_proj", True), ("mlp", True), ("model.layers.11", True), ("layers.11", True), ("model.layers.1", False),
    ("gate", False), ("mlp.gate", False), (UP, True), ("lm_head", False), ("", False), ("self_attn", False)])
def test_skipped_modules_are_ends_or_whole_components(name: str, matches: bool) -> None:
    assert read_skipped(targets(name), PLAIN, "ignore")(UP) is matches


@pytest.mark.parametrize(("pattern", "told"), [
    ("(a+)+b", "repeats more than a single character"), ("(a|a)*b", "repeats more than a single character"),
    ("(?:a?){40}b", "repeats more than a single character"), (r"(a)\1", "uses groupref"),
    ("(", "not a regular expression"),
    ("a" * 2000, "longer than"), (".*" * 5, "too many ways"), ("(a|a)" * 25, "too many ways"), ("a?" * 25, "too many"),
    ("(?:" * 2000 + ")" * 2000, "longer than"), ("(?:" * 150 + ")" * 150, ""), ("a{1,100000000000}", "not a regular"),
    ("a++", "uses possessive_repeat")])
def test_expressions_that_may_take_long_are_refused(pattern: str, told: str) -> None:
    if not told:
        read_targets(targets(f"re:{pattern}"), "ignore", PLAIN)
        return
    with pytest.raises(CheckpointError, match=r"config\.json: ignore holds") as caught:
        read_targets(targets(f"re:{pattern}"), "ignore", PLAIN)
    assert told in str(caught.value)


def test_many_expressions_are_bounded_together() -> None:
    assert read_targets(targets(*[f"re:.*layers.{index}.*" for index in range(80)]), "ignore", PLAIN)(UP)
    with pytest.raises(CheckpointError, match="too many ways to match"):
        read_targets(targets(*[f"re:.*a{index}.*b.*" for index in range(2000)]), "ignore", PLAIN)


def test_lists_are_bounded() -> None:
    with pytest.raises(CheckpointError, match=f"at most {MAX_NAMES} names"):
        read_targets(targets(*["a"] * (MAX_NAMES + 1)), "ignore", PLAIN)
    with pytest.raises(CheckpointError, match="list of strings"):
        read_targets(Fields({"ignore": ["a", 1]}, "config.json"), "ignore", PLAIN)
