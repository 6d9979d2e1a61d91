"""The step loop's one turn: scheduler, executor and detokenizers, put together."""

import logging
import random
from array import array

import msgspec

from radixserve.beam_search_params import BeamSearchParams
from radixserve.core.constraint import token_mask
from radixserve.core.kv_cache import KVCache
from radixserve.core.namespace import tenant_of
from radixserve.core.prompt_facts import explain
from radixserve.core.prompt_scores import PromptScores
from radixserve.core.scheduler import NewToken, Scheduler, SchedulerLimits
from radixserve.core.sequence import Request, Sequence
from radixserve.core.tiers.tiers import CacheTiers
from radixserve.core.tree_view import show_tree
from radixserve.engine.bad_words import encode_bad_words
from radixserve.engine.beam_requests import BeamRequests
from radixserve.engine.detokenizer import Detokenizer
from radixserve.engine.ended_answer import ended_answer
from radixserve.engine.grammar_compiler import GrammarCompiler
from radixserve.engine.pinning import reason_to_refuse_pins
from radixserve.errors import InvalidRequest, PinBudgetExceeded
from radixserve.events.start import KVEvents
from radixserve.protocol import (
    AddRequest,
    CacheStats,
    CacheWasReset,
    ControlCommand,
    ControlResult,
    Delta,
    EngineStats,
    ExplainPrompt,
    Failure,
    ResetCache,
    SaveCache,
    SaveProgress,
    ShowPins,
    ShowTenant,
    ShowTree,
    StepOutput,
    TokenLogprobs,
    Unpin,
    Unpinned,
)
from radixserve.runner.executor import Executor
from radixserve.tokenizer.tokenizer import Tokenizer

# A device can break so that every later step fails; then only a new process helps, and a supervisor starts one.
MAX_FAILED_STEPS_IN_A_ROW = 5

# What a store gets for the blocks that it has not written yet: less than an engine gets to end by itself.
STORE_CLOSE_SECONDS = 4.0

_LOST = Failure("internal_error", "the engine failed while it computed this request")

_log = logging.getLogger(__name__)


class EngineCore:
    """Owns all requests, the cache and the device of one engine. Single-threaded; one step at a time.

    max_queued_requests: of a tenant's that have not begun to run; a new one beyond them is refused. seed: source of the
    seeds of requests that bring none.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        cache: KVCache,
        limits: SchedulerLimits,
        *,
        max_queued_requests: int,
        seed: int = 0,
    ) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._cache = cache
        self._limits = limits
        self._tiers = None if cache.store is None else CacheTiers(cache, cache.store)
        self._scheduler = Scheduler(cache, limits, self._tiers)
        self._grammars = GrammarCompiler(tokenizer, limits.end_token_ids)
        self._beams = BeamRequests(tokenizer, cache, limits)
        self._max_queued_requests = max_queued_requests
        self._events: KVEvents | None = None
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._detokenizers: dict[Sequence, Detokenizer] = {}
        self._refusals: list[Delta] = []
        self._has_news = False
        self._num_steps = 0
        self._num_failed_steps_in_a_row = 0
        self._num_computed_tokens = 0
        self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether step() has something to compute or to tell."""
        return self._scheduler.has_work or self._has_news or self.seconds_until_wake() == 0

    def seconds_until_wake(self) -> float | None:
        """Return how long the engine may sleep while it has no work: then it has. None: until a message comes."""
        reasons = (self._cache.pins.seconds_until_expiry(), self._scheduler.seconds_until_poll)
        return min((seconds for seconds in reasons if seconds is not None), default=None)

    def close(self) -> None:
        """Let go of what an engine holds beside memory. No other call may follow."""
        if self._cache.store is not None:
            self._cache.store.close(STORE_CLOSE_SECONDS)
        if self._events is not None:
            self._events.close()

    def publish_events(self, events: KVEvents) -> None:
        """Publish what the cache does after each step from now on, until close, which closes events too."""
        self._events = events

    def add(self, message: AddRequest) -> None:
        """Queue a request. If it is refused, the next step's output says why."""
        self._cache.pins.expire()
        refusal = self._reason_to_refuse(message)
        if refusal is None:
            try:
                request = self._request(message)
                self._cache.pins.reserve(request.sequences[0], message.pins)
            except (InvalidRequest, PinBudgetExceeded) as error:
                refusal = Failure.of(error)
        if refusal is not None:
            self._refusals.append(_failure_delta(message.request_id, refusal))
            self._has_news = True
            return
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def abort(self, request_ids: list[str]) -> None:
        """End requests and free their blocks. Unknown ids, such as those of finished requests, are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._scheduler.end(request)
                self._forget(request)
                self._has_news = True

    def control(self, command: ControlCommand) -> ControlResult:
        """Run one command between two steps."""
        self._cache.pins.expire()
        match command:
            case ShowTenant(tenant):
                return self._scheduler.tenant_stats(tenant)
            case ResetCache(tenant):
                num_dropped_blocks, num_kept_blocks = self._cache.reset(tenant)
                if self._tiers is not None:
                    self._tiers.reset(tenant)
                self._has_news = True
                return CacheWasReset(num_dropped_blocks, num_kept_blocks)
            case ExplainPrompt():
                return explain(self._cache, command)
            case ShowTree(tenant):
                return show_tree(self._cache, command, self._scheduler.running_of(tenant))
            case SaveCache(begins):
                return self._save(begins=begins)
            case Unpin(pin_id, tenant):
                self._has_news = True
                return Unpinned(self._cache.pins.unpin(pin_id, tenant))
            case ShowPins(tenant, str(pin_id)):
                return self._cache.pins.show_one(pin_id, tenant)
            case ShowPins(tenant):
                return self._cache.pins.show(tenant)

    def step(self) -> StepOutput:
        """Compute one step, if there is anything to compute, and return what it produced.

        An exception in the executor ends the requests of that step with an error, and no others; at the
        MAX_FAILED_STEPS_IN_A_ROWth step in a row that fails it is raised, and the engine is lost.
        """
        deltas, self._refusals = self._refusals, []
        self._has_news = False
        self._cache.pins.expire()
        if self._scheduler.has_work:
            deltas += self._compute()
        if self._events is not None:
            self._events.publish()
        return StepOutput(deltas, self.stats())

    def stats(self) -> EngineStats:
        """Return the engine's figures as they are now."""
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            num_computed_tokens=self._num_computed_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_started_requests=self._scheduler.num_started,
            queue_seconds=self._scheduler.queue_seconds,
            num_overtakes=self._scheduler.num_overtakes,
            cache=self._cache_stats(),
        )

    def _cache_stats(self) -> CacheStats:
        stats = self._cache.stats()
        return stats if self._tiers is None else msgspec.structs.replace(stats, tiers=self._tiers.stats())

    def _save(self, *, begins: bool) -> SaveProgress:
        if self._tiers is None:
            return SaveProgress(True, 0, 0, "there is no tier to save to; start the server with --kv-cache-dir")
        return self._tiers.save(begins=begins)

    def _compute(self) -> list[Delta]:
        batch = self._scheduler.schedule()
        if batch.is_empty:
            return []
        began = self._cache.clock()
        try:
            sampled = self._executor.execute(batch)
        except Exception:
            self._num_failed_steps_in_a_row += 1
            if self._num_failed_steps_in_a_row == MAX_FAILED_STEPS_IN_A_ROW:
                raise
            _log.exception("a step of %d rows failed; its requests end with an error", len(batch.rows))
            lost = self._scheduler.fail_step()
            return [self._fail(request, _LOST) for request in lost]
        self._num_failed_steps_in_a_row = 0
        self._num_steps += 1
        if self._tiers is not None:
            self._tiers.record_step(batch, self._cache.clock() - began)
        self._num_computed_tokens += batch.num_tokens
        result = self._scheduler.update(batch, sampled)
        self._num_generated_tokens += len(result.new_tokens)
        deltas = [self._delta(token) for token in result.new_tokens if token.sequence.request not in result.failed]
        deltas += [self._fail(request, failure) for request, failure in result.failed.items()]
        for request in result.computed:
            deltas += _empty_answers(request)
            self._record_answers(request)
            self._forget(request)
        for request in result.searched:
            answers = self._beams.deltas(request)
            self._num_generated_tokens += sum(len(answer.token_ids) for answer in answers)
            deltas += answers
            self._record_answers(request)
            self._forget(request)
        for token in result.new_tokens:
            if token.sequence.request.is_finished:
                self._forget(token.sequence.request)
        return deltas

    def _delta(self, token: NewToken) -> Delta:
        """Turn a new token into text; a stop string in it ends the sequence here and now."""
        sequence = token.sequence
        request = sequence.request
        detokenizer = self._detokenizers.get(sequence)
        if detokenizer is None:
            prompt = sequence.token_ids[: request.num_prompt_tokens]
            detokenizer = self._detokenizers[sequence] = Detokenizer(self._tokenizer, prompt, request.params)
        text = detokenizer.push([token.token_id], is_end_token=token.is_end)
        if detokenizer.stopped_by is not None:
            self._scheduler.finish(sequence, "stop", detokenizer.stopped_by)
        elif sequence.finish_reason is not None:
            text += detokenizer.flush()
        if sequence.finish_reason is not None:
            self._record_answer(sequence)
        return Delta(
            request_id=request.request_id,
            index=sequence.choice_index,
            text=text,
            token_ids=[token.token_id],
            num_cached_tokens=request.num_cached_tokens or 0,
            logprobs=None if token.logprobs is None else [token.logprobs],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            prompt_logprobs=_untold_prompt_logprobs(request),
        )

    def _reason_to_refuse(self, message: AddRequest) -> Failure | None:
        limits = self._limits
        num_prompt_tokens = len(message.prompt_token_ids) // 4
        if not 1 <= num_prompt_tokens < limits.max_model_len:
            text = (
                f"the prompt has {num_prompt_tokens} tokens; max_model_len is {limits.max_model_len} here, prompt and "
                f"answer together, so a prompt has 1 to {limits.max_model_len - 1}"
            )
            return Failure("invalid_request", text, param="prompt")
        refusal = reason_to_refuse_pins(message, shares_prefixes=self._cache.shares_prefixes)
        if refusal is not None:
            return refusal
        if isinstance(message.params, BeamSearchParams):
            refusal = self._beams.reason_to_refuse(message.params, num_prompt_tokens)
            if refusal is not None:
                return refusal
        elif message.params.n > limits.max_num_seqs:
            text = f"n is {message.params.n}; max_num_seqs, the answers computed at once, is {limits.max_num_seqs} here"
            return Failure("invalid_request", text, param="n")
        # For each tenant, so that none can shut the others out, nor tell from a refusal how many of them wait.
        num_queued = self._scheduler.num_queued(tenant_of(message.namespace))
        if num_queued >= self._max_queued_requests:
            return Failure("queue_full", f"{num_queued} requests are waiting already; try again later")
        return None

    def _request(self, message: AddRequest) -> Request:
        """Return a new request with its one sequence. Raises InvalidRequest for what only shows when it is made."""
        token_ids = array("i")
        token_ids.frombytes(message.prompt_token_ids)
        beam, constraint = None, None
        if isinstance(message.params, BeamSearchParams):
            beam = self._beams.group(message.params, token_ids)
            params = message.params.sampling_params()
        else:
            params = message.params
            constraint = None if params.grammar is None else self._grammars.compile(params.grammar)
        num_alternatives = params.prompt_logprobs
        request = Request(
            request_id=message.request_id,
            params=params,
            namespace=message.namespace,
            num_prompt_tokens=len(token_ids),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            priority=message.priority,
            allowed_tokens=None if params.allowed_token_ids is None else token_mask(params.allowed_token_ids),
            bad_words=encode_bad_words(params.bad_words, self._tokenizer),
            prompt_scores=None if num_alternatives is None else PromptScores(len(token_ids), num_alternatives),
            beam=beam,
            tool_call_begin=message.tool_call_begin,
        )
        request.sequences.append(Sequence(request, 0, token_ids, constraint=constraint))
        return request

    def _record_answers(self, request: Request) -> None:
        for sequence in request.sequences:
            self._record_answer(sequence)

    def _record_answer(self, sequence: Sequence) -> None:
        """Tell the cache how an answer ended, which it learns from what to keep."""
        self._cache.record_answer(sequence, ended_answer(sequence, self._tokenizer))

    def _fail(self, request: Request, failure: Failure) -> Delta:
        self._forget(request)
        return _failure_delta(request.request_id, failure)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        for sequence in request.sequences:
            self._detokenizers.pop(sequence, None)
        # They refer to each other. Apart, both are freed here and now, with all tokens, and not by a collection.
        request.sequences.clear()


def _untold_prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    return None if request.prompt_scores is None else request.prompt_scores.take()


def _empty_answers(request: Request) -> list[Delta]:
    """Return the only deltas of a request that wants no token: one for each of its answers."""
    return [
        Delta(
            request_id=request.request_id,
            index=index,
            text="",
            token_ids=[],
            num_cached_tokens=request.num_cached_tokens or 0,
            finish_reason="length",
            prompt_logprobs=_untold_prompt_logprobs(request),
        )
        for index in range(request.params.n)
    ]


def _failure_delta(request_id: str, failure: Failure) -> Delta:
    return Delta(request_id=request_id, index=0, text="", token_ids=[], failure=failure)
