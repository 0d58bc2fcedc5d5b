"""An explanation as one sentence: the largest parts of a request's time first, and why it waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slotwise.core import cache_causes, reasons
from slotwise.core.record import ANOTHER_REQUEST
from slotwise.observe.request_timeline import STEP_UNDER_WAY

if TYPE_CHECKING:
    from slotwise.observe.explain import CacheSpan, Explanation, Share

SMALL = 0.02  # of the total: parts that are named together
MOST = 5  # parts that are named one by one
NS = 1e-9

BECAUSE = {
    reasons.NO_SLOT: "all slots were taken",
    reasons.NO_ADAPTER_SLOT: "as many adapters ran as a step may have",
    reasons.NO_BLOCKS: "the cache had too few free blocks",
    reasons.LOAD_LIMIT: "a step copies only so many blocks from host memory",
    reasons.TOKEN_BUDGET: "the token budget of the step was spent",
    reasons.SHORT_STEP: "the step was kept short for a tenant that may come",
    reasons.TIME_BUDGET: "the step would have taken too long",
    reasons.TIER_CAP: "the free slots belong to other tiers",
    reasons.FIRST_TOKEN: "a tenant far behind went first",
    reasons.OUTRANKED: "a request that goes before it needed the slot",
    reasons.TOKEN_PENDING: "the token of its last row was on its way",
    reasons.ENDING: "its last token was on its way",
    reasons.GRAMMAR_COMPILING: "its grammar was being compiled",
    reasons.WAITING_FOR_KV: "the blocks of its prompt had not arrived",
    reasons.VERIFYING: "its drafts were being verified",
    reasons.MICRO_BATCH: "another stage had its turn",
    reasons.PROMPTS_ALONE: "new prompts ran alone",
    reasons.BATCH_RUNNING: "a static batch had to end first",
    reasons.WINDOW_OPEN: "a batch was being collected",
    reasons.ONE_AT_A_TIME: "requests ran one at a time",
    STEP_UNDER_WAY: "a step was under way",
}


MISSED = {
    cache_causes.NEW: "they were not cached",
    cache_causes.EVICTED: "they were evicted",
    cache_causes.DIVERGED: "the nearest cached prompt differs",
    cache_causes.RESET: "the cache was reset, or the model slept, since they were cached",
    cache_causes.OTHER_SALT: "they are cached under another cache_salt",
    cache_causes.OTHER_ADAPTER: "they are cached for another adapter",
    cache_causes.LOAD_LIMIT: "a step copies only so many blocks from host memory",
    cache_causes.TOO_SHORT: "the prompt is shorter than a block, and only full blocks are cached",
    cache_causes.LAST_BLOCK: "the last block of a prompt is always computed",
    cache_causes.WHOLE_PROMPT: "the request needs results at every position of its prompt",
    cache_causes.DISABLED: "prefix caching is off",
}


def sentence(explanation: Explanation) -> str:
    """Returns where the time of a request went."""
    total = explanation.total_ns
    if not total:
        return "Nothing is known yet of where its time goes."
    shares = sorted((share for share in explanation.shares if share.ns >= SMALL * total),
                    key=lambda share: share.ns, reverse=True)[:MOST]
    named = [f"{_duration(share.ns)} {_what(explanation, share)}" for share in shares]
    if rest := total - sum(share.ns for share in shares):
        named.append(f"{_duration(rest)} for everything else")
    said = "It took" if explanation.timeline.ended else "So far it takes"
    return f"{said} {_duration(total)}: {_listed(named)}.{_more(explanation)}"


def _what(explanation: Explanation, share: Share) -> str:
    request = explanation.timeline.request
    because = f", because {BECAUSE.get(share.reason, share.reason.replace('_', ' '))}" if share.reason else ""
    cached, received = explanation.num_cached, explanation.timeline.num_received
    computed = max(0, request.num_prompt - cached - received)
    others = [f"the other {cached} were in the cache"] if cached else []
    others += [f"{'' if cached else 'the other '}{received} had been computed by another engine"] if received else []
    of_cached = f" ({' and '.join(others)})" if others else ""
    return {
        "tokenizing": "reading and tokenizing the request",
        "handing_over": "until the engine had it",
        "queue": f"waiting for a slot{because}",
        "scheduling": "between steps, while the next one was planned",
        "prefill": f"computing {_tokens(computed)} of the prompt{of_cached}",
        "decode": f"computing {_tokens(explanation.timeline.num_output)} of output",
        "neighbors": "for the other requests in the same steps",
        "held": "held until its batch had ended",
        "paused": f"with a slot but left out of steps{because}",
        "preempted": f"without the slot that it had to give up{because}",
        "recompute": "computing again what a preemption had lost",
        "failed_step": "in a step that failed",
        "siblings": "waiting for the other choices of its response",
        "sending": "writing and sending the text",
    }[share.part]


def cache_sentence(spans: Sequence[CacheSpan]) -> str:
    """Returns what the prefix cache had of a prompt, and why not more; "" before its first slot."""
    if not spans:
        return ""
    found, missed = [span for span in spans if span.is_found], [span for span in spans if not span.is_found]
    said = f"Of {_tokens(spans[-1].end, 'prompt token')} {sum(span.num_tokens for span in found):,} were cached"
    if on_disk := sum(span.num_tokens for span in found if span.cause == cache_causes.FOUND_ON_DISK):
        said += f" ({on_disk:,} of them on disk)"
    if found:
        said += f", which saved {_duration(sum(span.ns for span in found))}"
    return f"{said}; computed: {_listed([_missed(span) for span in missed])}."


def _missed(span: CacheSpan) -> str:
    return f"{span.num_tokens:,} ({_duration(span.ns)}), because {_miss(span)}"


def _miss(span: CacheSpan) -> str:
    """Why a span was not found."""
    if span.cause == cache_causes.EVICTED:
        whom = "another request" if span.request_id == ANOTHER_REQUEST else f"request {span.request_id}"
        when = f" {_duration(span.before_ns)} before" if span.before_ns else ""
        return f"they were evicted{when}, when {whom} needed their blocks"
    if span.cause == cache_causes.DIVERGED:
        return f"the nearest cached prompt differs from token {span.position:,} on"
    if span.cause == cache_causes.NEW and span.before_ns:
        return f"they were not cached: the engine started {_duration(span.before_ns)} before, with an empty cache"
    return MISSED[span.cause]


def _more(explanation: Explanation) -> str:
    more, timeline = "", explanation.timeline
    if explanation.num_drafts:
        more += f" {explanation.num_accepted} of {_tokens(explanation.num_drafts, 'draft')} were right."
    if (asked := timeline.request.spec.retain) and timeline.over_at >= 0:
        more += (f" It asked to be kept in the cache for {asked:,.0f} s: {_tokens(timeline.num_retained)} of it are, "
                 "unless running requests need the blocks." if timeline.num_retained else
                 f" It asked to be kept in the cache for {asked:,.0f} s, and is not.")
    return more


def _tokens(count: int, what: str = "token") -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _listed(parts: list[str]) -> str:
    separator = "; " if any("," in part for part in parts) else ", "
    return parts[0] if len(parts) == 1 else f"{separator.join(parts[:-1])}{separator}and {parts[-1]}"


def _duration(ns: int) -> str:
    seconds = ns * NS
    if seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"
