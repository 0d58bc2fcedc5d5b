"""Requests of the offline API: from the engine's tokens to outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from slotwise.core.params import SamplingParams as EngineParams
from slotwise.core.request import RequestSpec
from slotwise.core.slo import SLO
from slotwise.core.step import TokenLogprobs
from slotwise.engine.messages import UNSUBMITTED, Add
from slotwise.offline.residents import BASE, Held
from slotwise.outputs import CompletionOutput, RequestOutput, by_token
from slotwise.sampling_params import RequestOutputKind, SamplingParams
from slotwise.text.continuation import Continuation, VisibleTokens
from slotwise.text.tokenizer import Tokenizer


class Job:
    """A prompt and its continuations.

    Args:
        output: without continuations.
        engine_params: what the engine needs of `params`.
        seed: of the first continuation; the next ones have the next numbers.
        eos_ids: the model's end tokens.
    """

    def __init__(self, output: RequestOutput, params: SamplingParams, engine_params: EngineParams, seed: int,
                 tokenizer: Tokenizer, eos_ids: Collection[int], salt: str = "", priority: int = 0,
                 adapter: Held = BASE) -> None:
        self.output = output
        self.kind = params.output_kind
        self.interval = params.stream_interval or 1
        self.text_of = tokenizer.token_text
        self._params, self._seed, self._salt, self._slo = engine_params, seed, salt, SLO(priority=priority)
        self._adapter = adapter
        stop_ids = set(engine_params.stop_token_ids).difference(() if engine_params.ignore_eos else eos_ids)
        shown = VisibleTokens(stop=params.include_stop_str_in_output, special=not params.skip_special_tokens)
        self.choices = []
        for index in range(engine_params.n):
            text = Continuation(tokenizer, output.prompt_token_ids, engine_params.stop, engine_params.min_tokens,
                                shown) if params.detokenize else None
            completion = CompletionOutput(index)
            if engine_params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            self.choices.append(Choice(self, completion, text, stop_ids))
        output.outputs = [choice.completion for choice in self.choices]
        output.prompt_logprobs = None if engine_params.prompt_logprobs is None else [None]

    def add(self, choice: Choice, name: str, request_id: int = UNSUBMITTED) -> Add:
        """The command that starts a continuation, under a name that is unique among the unfinished ones."""
        index = choice.completion.index
        return Add(request_id, RequestSpec(
            tuple(self.output.prompt_token_ids), self._params.of_choice(index), (self._seed + index) % 2**64,
            salt=self._salt, slo=self._slo, adapter=self._adapter.number, adapter_name=self._adapter.name), name=name)

    def read_prompt(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Adds entries of the prompt's tokens from position `start + 1` on; known ones, computed again, are ignored."""
        known, ids = self.output.prompt_logprobs, self.output.prompt_token_ids
        if known is not None and len(known) < len(ids):
            first = len(known)
            known += [by_token(token, entry, self.text_of) for token, entry in zip(
                ids[first:], entries[first - 1 - start :], strict=False)]

    def snapshot(self, choices: Iterable[Choice]) -> RequestOutput:
        """An output of these continuations as they are now, that no later token changes."""
        outputs = [choice.pop() if self.kind is RequestOutputKind.DELTA else choice.copy() for choice in choices]
        return replace(self.output, outputs=outputs, metrics=replace(self.output.metrics))

    def raise_errors(self) -> None:
        """Raises RuntimeError with the first message of a continuation that failed."""
        for choice in self.choices:
            if choice.error:
                raise RuntimeError(choice.error)


class Choice:
    """One continuation: turns its tokens into text as they come.

    Args:
        text: None where only token ids are wanted.
        stop_ids: stop tokens of the request, as far as they are no end tokens of the model.
    """

    def __init__(self, job: Job, completion: CompletionOutput, text: Continuation | None,
                 stop_ids: Collection[int]) -> None:
        self.job = job
        self.completion = completion
        self.error = ""  # why it ended, if it failed
        self._text = text
        self._stop_ids = stop_ids

    @property
    def index(self) -> int:
        return self.completion.index

    def add(self, name: str, request_id: int) -> Add:
        """As that of the job."""
        return self.job.add(self, name, request_id)

    @property
    def met_stop_string(self) -> bool:
        return self._text is not None and self._text.stop_reason is not None

    @property
    def looks_for_stops(self) -> bool:
        return self._text is not None and self._text.looks_for_stops

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float, reason: str = "") -> None:
        """Adds tokens that came at `now`; none behind a stop string.

        Args:
            reason: why these are the last.
        """
        if self.met_stop_string:
            return
        completion = self.completion
        text, kept = self._text.read(tokens, reason) if self._text is not None else ("", len(tokens))
        completion.text += text
        completion.token_ids += tokens[:kept]
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            for token, entry in zip(tokens[:kept], logprobs, strict=False):
                completion.logprobs.append(by_token(token, entry, self.job.text_of))
                completion.cumulative_logprob += entry.logprob
        if kept:
            self.job.output.metrics.generated(kept, now)
        if self.met_stop_string and self._text is not None:
            completion.stop_reason = self._text.stop_reason
        elif reason == "stop" and tokens and tokens[-1] in self._stop_ids:
            completion.stop_reason = tokens[-1]

    def end(self, reason: str, message: str, now: float) -> None:
        """Args: message: why it failed, if it did."""
        output = self.job.output
        self.completion.finish_reason = "stop" if self.met_stop_string else reason
        self.error = message
        output.finished = all(choice.completion.finished() for choice in self.job.choices)
        output.metrics.finished_time = now if output.finished else 0.0

    def copy(self) -> CompletionOutput:
        one = self.completion
        logprobs = None if one.logprobs is None else list(one.logprobs)
        return replace(one, token_ids=list(one.token_ids), logprobs=logprobs)

    def pop(self) -> CompletionOutput:
        """What came since the last call; the sum of log-probabilities remains that of all."""
        one, self.completion = self.completion, replace(self.completion, text="", token_ids=[])
        if one.logprobs is not None:
            self.completion.logprobs = []
        return one
