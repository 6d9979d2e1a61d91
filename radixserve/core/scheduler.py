"""Continuous batching: each step gives each sequence some tokens within one budget.

There are no prefill and decode phases. A sequence has tokens whose K/V are not computed yet: many while its prompt is
new or it resumes after a preemption, one while it generates. A step computes some of them for each running sequence;
a row that reaches the last one draws the next token.

Around it: who waits (waiting.py, in the order of policy.py), which tenant's turn it is (tenant_queues.py), who starts
(admission.py), who runs and who gives way (running.py), and how beam groups do all that (beam_schedule.py).
"""

import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field

from radixserve.config import SchedulePolicy
from radixserve.core.admission import Admission
from radixserve.core.batch import SampledTokens, ScheduledBatch
from radixserve.core.beam_schedule import BeamSchedule
from radixserve.core.kv_cache import KVCache
from radixserve.core.policy import POLICIES
from radixserve.core.rows import row_of
from radixserve.core.running import RunningSequences
from radixserve.core.sequence import Request, Sequence, SequenceStatus
from radixserve.core.tenant_queues import TenantQueues
from radixserve.core.tiers.tiers import CacheTiers
from radixserve.core.units import is_behind, is_generating_beam, num_answers_drawn, num_uncomputed_tokens
from radixserve.errors import RequestError
from radixserve.protocol import Failure, FinishReason, TenantStats, TokenLogprobs

_NOT_FINITE = Failure("internal_error", "the model's numbers for this request are not finite")


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerLimits:
    """What a step and a sequence may take, and by which policy they get it.

    max_num_batched_tokens must be at least max_num_seqs, so that every running sequence advances in every step.
    max_model_len tokens must fit the pool: then each admitted sequence can run alone.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    end_token_ids: frozenset[int]
    schedule_policy: SchedulePolicy = "cache-aware"


@dataclass(slots=True, frozen=True)
class NewToken:
    """A token that a step appended to a sequence. sequence.finish_reason says whether it was the last.

    is_end: it is an end or stop token that ended the sequence, and no part of the text.
    """

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None
    is_end: bool


@dataclass(slots=True, frozen=True)
class StepResult:
    """What update made of a step.

    new_tokens: in row order; those of a failed request mean nothing. failed: requests that ended without an answer, and
    why. computed: requests that want no token, whose prompt is computed now. searched: requests whose beam search is
    over; a beam search has no new tokens.
    """

    new_tokens: list[NewToken] = field(default_factory=list)
    failed: dict[Request, Failure] = field(default_factory=dict)
    computed: list[Request] = field(default_factory=list)
    searched: list[Request] = field(default_factory=list)


class Scheduler:
    """Decides what each step computes. The policy says who starts first, and who gives way when the pool is exhausted.

    One step is schedule(), the executor's work, then update(). Requests come and go between steps only.
    tiers: what lies below the cache, if anything does.
    """

    def __init__(self, cache: KVCache, limits: SchedulerLimits, tiers: CacheTiers | None = None) -> None:
        self._cache = cache
        self._limits = limits
        self._tiers = tiers
        self._policy = POLICIES[limits.schedule_policy]
        self._waiting = TenantQueues(self._policy, cache, tiers)
        self._running = RunningSequences(cache, self._waiting)
        self._beams = BeamSchedule(cache, self._waiting, self._running)
        self._admission = Admission(
            cache,
            self._waiting,
            self._running,
            self._beams,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self._scheduled: list[tuple[Sequence, int]] = []
        self._is_stalled = False
        self._num_arrived = 0
        self._num_arrived_of = Counter[str | None]()

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_started(self) -> int:
        """Requests that have begun to run."""
        return self._admission.num_started

    @property
    def queue_seconds(self) -> float:
        """How long those waited for it, added up."""
        return self._admission.queue_seconds

    @property
    def num_overtakes(self) -> int:
        """How often a request had one of its tenant and priority that came later start before it."""
        return self._admission.num_overtakes

    @property
    def num_preemptions(self) -> int:
        """How often a sequence or a beam group had to give up its blocks."""
        return self._running.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether schedule() would find something to do."""
        if self.seconds_until_poll == 0.0:
            return True
        return bool(self._waiting or self._running) and not self._is_stalled

    @property
    def seconds_until_poll(self) -> float | None:
        """When schedule() may find what was read from a tier, or room to save more to it; None if there is no need."""
        return None if self._tiers is None else self._tiers.seconds_until_poll

    def num_queued(self, tenant: str | None) -> int:
        """How many requests of a tenant have not begun to run. Preempted ones, let in before, are not among them."""
        return self._waiting.num_new(tenant)

    def tenant_stats(self, tenant: str | None) -> TenantStats:
        """Return one tenant's figures, in time proportional to the blocks that it has in use."""
        return self._cache.tenant_stats(tenant, self.running_of(tenant), self._waiting.num_waiting(tenant))

    def running_of(self, tenant: str | None) -> list[Sequence]:
        """Return a tenant's sequences that hold blocks."""
        return [sequence for sequence in self._running if sequence.request.tenant == tenant]

    def add(self, request: Request) -> None:
        """Queue a request with its one sequence, whose tokens are the prompt (at least one, under max_model_len)."""
        (sequence,) = request.sequences
        request.arrival = self._num_arrived
        request.queued_at = time.monotonic()
        self._num_arrived += 1
        request.number = self._num_arrived_of[request.tenant]
        self._num_arrived_of[request.tenant] += 1
        self._is_stalled = False
        self._waiting.add(sequence)
        if self._tiers is not None:
            self._tiers.prefetch(sequence, self._cache.match(sequence))

    def end(self, request: Request) -> None:
        """End every sequence of a request and free its blocks; what was computed stays in the cache."""
        for sequence in request.sequences:
            self._end_sequence(sequence)
        self._cache.pins.forget(request)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End one sequence for a reason that its caller is told."""
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        self._end_sequence(sequence)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's tokens and make room for them. Running sequences come first; it may preempt some."""
        self._scheduled = []
        budget = self._schedule_running(self._limits.max_num_batched_tokens)
        loads = None
        if self._tiers is not None:
            num_spare_blocks = self._running.num_spare_blocks()
            loads = self._tiers.schedule_loads(num_spare_blocks, is_busy=bool(self._scheduled))
        self._admission.admit(self._scheduled, budget)
        spills = array("i")
        if self._tiers is not None:
            spills = self._tiers.schedule_spills(is_busy=bool(self._scheduled))
        end_token_ids = self._limits.end_token_ids
        batch = ScheduledBatch(
            rows=[row_of(sequence, num_tokens, end_token_ids) for sequence, num_tokens in self._scheduled],
            copies=self._cache.take_copies(),
            spills=spills,
            loads=loads,
        )
        # All who wait do so for a tier: there is nothing to do before the next poll.
        self._is_stalled = batch.is_empty and self.seconds_until_poll is not None
        return batch

    def update(self, batch: ScheduledBatch, sampled: SampledTokens) -> StepResult:
        """Take in what the executor made of the batch that the last schedule() returned."""
        result = StepResult()
        draws = iter(zip(sampled.token_ids, sampled.logprobs, strict=True))
        candidates = iter(sampled.candidates)
        selecting: dict[Request, list[list[tuple[int, float]]]] = {}
        rows = zip(self._scheduled, batch.rows, sampled.is_finite, strict=True)
        for index, ((sequence, num_tokens), row, is_finite) in enumerate(rows):
            row_draws = [next(draws) for _ in row.samples]
            row_candidates = [next(candidates, None) for _ in row.samples]
            request = sequence.request
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # its request failed in a row before
            if not is_finite:
                self.end(request)
                result.failed[request] = _NOT_FINITE
                continue
            if request.prompt_scores is not None and index in sampled.prompt_logprobs:
                request.prompt_scores.add(row.num_computed_tokens, sampled.prompt_logprobs[index])
            sequence.num_computed_tokens += num_tokens
            self._cache.commit(sequence)
            if request.pins:
                self._cache.pins.make(sequence)
            if row_candidates and row_candidates[0] is not None:
                selecting.setdefault(request, []).append(row_candidates[0])
            elif row_draws:
                self._take_draws(sequence, row_draws, result)
            elif sequence.num_uncomputed_tokens == 0:
                self.finish(sequence, "length")
                result.computed.append(request)
        for request, group_candidates in selecting.items():
            if not request.is_finished:
                self._select_beams(request, group_candidates, result)
        if self._tiers is not None:
            self._tiers.finish(sampled)
        self._cache.end_step()
        return result

    def fail_step(self) -> list[Request]:
        """End the requests of the last schedule(), whose step was lost, and return them."""
        requests = list({id(sequence.request): sequence.request for sequence, _ in self._scheduled}.values())
        for request in requests:
            self.end(request)
        if self._tiers is not None:
            self._tiers.fail()
        self._cache.end_step()
        return requests

    def _schedule_running(self, budget: int) -> int:
        """Schedule those that run, in the order of their rank, and return what they leave of the budget."""
        by_rank = sorted(self._running.units(), key=self._policy.rank)
        num_tokens_of = _share_budget(by_rank, budget)
        queue = deque(by_rank)
        while queue:
            sequence = queue.popleft()
            num_tokens = num_tokens_of[sequence]
            rows: list[tuple[Sequence, int]] = []
            if num_tokens < num_uncomputed_tokens(sequence) and self._waiting.has_one_before(sequence):
                # A prompt too long for this step would keep a better priority from starting. What it has computed
                # stays in the cache, so it loses little, and whoever shares its prefix goes on from there.
                self._running.preempt(sequence)
            elif is_generating_beam(sequence):
                rows = self._beams.schedule(sequence.request, num_tokens, queue)
            elif num_tokens and self._running.make_room(sequence, num_tokens, queue):
                rows = [(sequence, num_tokens)]
            self._scheduled += rows
            budget -= sum(num_row_tokens for _, num_row_tokens in rows)
        return budget

    def _take_draws(
        self, sequence: Sequence, draws: list[tuple[int, TokenLogprobs | None]], result: StepResult
    ) -> None:
        """Append the tokens that a row drew, one for each answer that it stands for."""
        try:
            for answer, (token_id, logprobs) in zip(self._answers(sequence), draws, strict=True):
                is_end = self._append(answer, token_id)
                result.new_tokens.append(NewToken(answer, token_id, logprobs, is_end))
        except RequestError as error:
            self.end(sequence.request)
            result.failed[sequence.request] = Failure.of(error)

    def _select_beams(self, request: Request, candidates: list[list[tuple[int, float]]], result: StepResult) -> None:
        assert request.beam is not None
        self._beams.select(request, candidates)
        if request.beam.is_done:
            self.end(request)
            result.searched.append(request)

    def _answers(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that a row's draws belong to, forking the prompt's for the other choices once."""
        request = sequence.request
        for choice_index in range(len(request.sequences), len(request.sequences) + num_answers_drawn(sequence) - 1):
            child = Sequence(request, choice_index, array("i", sequence.token_ids))
            if sequence.constraint is not None:
                child.constraint = sequence.constraint.fork()
            self._cache.fork(sequence, child)
            self._running.add(child)
            request.sequences.append(child)
        return request.sequences if sequence.num_output_tokens == 0 else [sequence]

    def _append(self, sequence: Sequence, token_id: int) -> bool:
        """Append a token, which may finish the sequence, and return whether it is an end or stop token that did.

        Raises a RequestError if the sequence's constraint cannot follow.
        """
        params, constraint = sequence.request.params, sequence.constraint
        sequence.token_ids.append(token_id)
        if token_id in params.stop_token_ids:
            self.finish(sequence, "stop", token_id)
            return True
        if token_id in self._limits.end_token_ids and not (params.ignore_eos and constraint is None):
            self.finish(sequence, "stop")
            return True
        if constraint is not None:
            constraint.accept(token_id)
        if constraint is not None and constraint.is_complete:
            self.finish(sequence, "stop")
        elif sequence.num_output_tokens == params.max_tokens or sequence.num_tokens >= self._limits.max_model_len:
            self.finish(sequence, "length")
        return False

    def _end_sequence(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED


def _share_budget(sequences: list[Sequence], budget: int) -> dict[Sequence, int]:
    """Return how many tokens each sequence computes, those in front first.

    Generating sequences come before prompts: a long prompt gets what they leave, so it delays no one's next token by a
    step. A budget of a token for each sequence lets the first prompt advance too.
    """
    shares = {}
    for sequence in sorted(sequences, key=is_behind):
        shares[sequence] = min(num_uncomputed_tokens(sequence), budget)
        budget -= shares[sequence]
    return shares
