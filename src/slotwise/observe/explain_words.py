"""An explanation as one sentence: the largest parts of a request's time first, and why it waited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slotwise.core import reasons
from slotwise.observe.request_timeline import STEP_UNDER_WAY

if TYPE_CHECKING:
    from slotwise.observe.explain import Explanation, Share

SMALL = 0.02  # of the total: parts that are named together
MOST = 5  # parts that are named one by one
NS = 1e-9

BECAUSE = {
    reasons.NO_SLOT: "all slots were taken",
    reasons.NO_ADAPTER_SLOT: "as many adapters ran as a step may have",
    reasons.NO_BLOCKS: "the cache had too few free blocks",
    reasons.TOKEN_BUDGET: "the token budget of the step was spent",
    reasons.SHORT_STEP: "the step was kept short for a tenant that may come",
    reasons.TIME_BUDGET: "the step would have taken too long",
    reasons.TIER_CAP: "the free slots belong to other tiers",
    reasons.FIRST_TOKEN: "a tenant far behind went first",
    reasons.OUTRANKED: "a request that goes before it needed the slot",
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
    computed = max(0, request.num_prompt - explanation.num_cached)
    of_cached = f" (the other {explanation.num_cached} were in the cache)" if explanation.num_cached else ""
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
