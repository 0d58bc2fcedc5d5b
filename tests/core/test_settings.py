"""One dataclass field declares a setting: its default, range, choices and help."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from slotwise.cli import build_parser
from slotwise.core.setting_fields import LIVE, aliases_of, check_settings, real, redeclared, setting, settings_of, whole
from slotwise.engine.config import EngineConfig


@dataclass(frozen=True)
class Base:
    slots: int = setting(64, "slots of the batch", unit="N", range=whole(1, 100), phase=LIVE)
    share: float | None = setting(None, "share of the memory", range=real(0, 1), otherwise="what is free")
    kind: str = setting("fast", "how", choices=("fast", "slow"))
    is_on: bool = setting(default=False, help="whether it is on")
    names: tuple[str, ...] = setting(factory=tuple, help="names")


@dataclass(frozen=True)
class Derived(Base):
    slots: int = redeclared(Base, "slots", 8)
    path: str = setting("", "a file")

    def __post_init__(self) -> None:
        check_settings(self)


def test_a_field_declares_all_there_is_to_say() -> None:
    declared = settings_of(Base)
    assert list(declared) == ["slots", "share", "kind", "is_on", "names"]
    slots = declared["slots"]
    assert (slots.name, slots.default, slots.unit, slots.phase) == ("slots", 64, "N", LIVE)
    assert slots.help == "slots of the batch"
    assert slots.schema == {"type": "integer", "minimum": 1, "maximum": 100}
    assert declared["share"].schema == {
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]}
    assert declared["kind"].schema == {"type": "string", "enum": ["fast", "slow"]}
    assert declared["names"].default == ()


def test_vllms_names_lead_to_settings() -> None:
    assert aliases_of(EngineConfig) == {"kv_cache_memory_bytes": "kv_cache_memory"}
    for option in ("--kv-cache-memory", "--kv-cache-memory-bytes"):
        assert build_parser("serve").parse_args(["serve", option, "1MiB"]).kv_cache_memory == 1 << 20


def test_another_default_leaves_the_rest_of_a_declaration() -> None:
    assert settings_of(Derived)["slots"].default == 8
    assert settings_of(Derived)["slots"].range == whole(1, 100)
    assert Derived().slots == 8
    assert list(settings_of(Derived)) == [*settings_of(Base), "path"]


@pytest.mark.parametrize(("wrong", "message"), [
    ({"slots": 0}, "slots must be a whole number from 1 to 100, not 0"),
    ({"slots": True}, "slots must be a whole number from 1 to 100, not True"),
    ({"slots": None}, "slots must be a whole number from 1 to 100, not None"),
    ({"share": 2}, "share must be a number from 0 to 1, not 2"),
    ({"kind": "middling"}, "kind must be one of fast, slow, not 'middling'"),
    ({"kind": ["fast"]}, r"kind must be one of fast, slow, not \['fast'\]"),
    ({"is_on": 1}, "is_on must be true or false, not 1"),
    ({"path": 5}, "path must be a text, not 5"),
])
def test_a_wrong_value_is_refused_with_the_name_and_what_would_be_right(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Derived(**wrong)  # type: ignore[arg-type]
    assert Derived(share=None).share is None


def test_declared_fields_are_encoded_as_any_others() -> None:
    value = Derived(slots=9, share=0.5)
    assert msgspec.json.decode(msgspec.json.encode(value), type=Derived) == value
