"""The metrics, from the tables that name and explain them."""

from __future__ import annotations

from docs.generate.markdown import code, listed, number, sentence, table

from slotwise.observe.metrics import (
    ABSENT,
    BY_LAYER,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELED,
    LAYER,
    NAMES,
    OLDER,
    PREFIX,
    STEP,
    STEP_TIME,
    STEP_TIME_HELP,
    VLLM_PREFIX,
    WAITING,
    Labeled,
    step_times,
)


def metrics() -> str:
    """Returns the table of all metrics but those labeled with settings."""
    steps = Labeled("kind", tuple(step_times()), STEP_TIME_HELP)
    rows = [
        *((name, "gauge", sentence(text)) for name, text in GAUGES.items()),
        ("num_requests_waiting_by_reason", "gauge", _with_label(WAITING)),
        *((name, "gauge", _with_label(Labeled(LAYER, (), text))) for name, text in BY_LAYER.items()),
        *((name, "counter", sentence(text)) for name, text in COUNTERS.items()),
        *((name, "counter", _with_label(labeled)) for name, labeled in LABELED.items()),
        *((name, "histogram", sentence(text)) for name, (_, text) in HISTOGRAMS.items()),
        (STEP_TIME, "histogram", _with_label(steps)),
    ]
    return table(("metric", "type", "meaning"), [(code(PREFIX + name), kind, text) for name, kind, text in rows])


def buckets() -> str:
    """Returns the table of the histograms' upper bounds."""
    bounds = {name: bounds for name, (bounds, _) in HISTOGRAMS.items()} | {STEP_TIME: STEP}
    alike: dict[tuple[float, ...], list[str]] = {}
    for name, upper in bounds.items():
        alike.setdefault(tuple(upper), []).append(name)
    return table(("histograms", "upper bounds"), [
        (listed(names) + ".", ", ".join(map(number, upper)) + ".") for upper, names in alike.items()])


def vllm_metrics() -> str:
    """Returns the names that `--vllm-metrics` adds, and those that it adds for older rules."""
    older = (f"{code(VLLM_PREFIX + theirs)} for {code(ours)}" for ours, theirs in OLDER.items())
    return f"{listed(VLLM_PREFIX + name for name in NAMES)}; and by older names {', '.join(older)}."


def absent_metrics() -> str:
    """Returns the table of vLLM's metrics that are not served."""
    return table(("metric of vLLM's", "why it is absent"), [
        (code(name if name.startswith("http") else VLLM_PREFIX + name), sentence(why)) for name, why in ABSENT.items()])


def _with_label(labeled: Labeled) -> str:
    """Returns the meaning, and the label with the values that are shown from the start."""
    values = f": {listed(labeled.values)}" if labeled.values else ""
    return f"{sentence(labeled.help)} Label {code(labeled.label)}{values}."
