"""Continuous batching: each step gives each sequence some tokens within one budget.

There are no prefill and decode phases. A sequence has tokens whose K/V are not computed yet: many while its prompt is
new or it resumes after a preemption, one while it generates. A step computes some of them for each running sequence;
a row that reaches the last one draws the next token.

The beams of a group are one to the scheduler: they run, wait and give up their blocks together. After a preemption
they are computed again one after another, each but for its last token; those are computed in one step, in which all
beams bring their candidates.
"""

import time
from array import array
from collections import deque
from dataclasses import dataclass, field

from radixserve.config import SchedulePolicy
from radixserve.core.batch import SampledTokens, SampleSlot, ScheduledBatch, ScheduledRow
from radixserve.core.beam_members import count_blocks, fork_and_release, num_blocks_wanted, resume_order
from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.policy import POLICIES
from radixserve.core.sequence import Request, Sequence, SequenceStatus
from radixserve.core.waiting import WaitingQueue
from radixserve.errors import RequestError
from radixserve.protocol import Failure, FinishReason, TokenLogprobs

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

    num_queued: requests that have not begun to run. Preempted ones are not among them: they were let in before.
    num_started: requests that have. queue_seconds: how long they waited for that, added up. num_overtakes: how often a
    request had one of no other priority that came later start before it.

    One step is schedule(), the executor's work, then update(). Requests come and go between steps only.
    """

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._policy = POLICIES[limits.schedule_policy]
        self._waiting = WaitingQueue(self._policy, cache)
        self._running: list[Sequence] = []
        self._scheduled: list[tuple[Sequence, int]] = []
        self._num_arrived = 0
        self.num_preemptions = 0
        self.num_queued = 0
        self.num_started = 0
        self.queue_seconds = 0.0
        self.num_overtakes = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether schedule() would find something to do."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request with its first sequence, whose tokens are the prompt (at least one, under max_model_len)."""
        request.arrival = self._num_arrived
        request.queued_at = time.monotonic()
        self._num_arrived += 1
        for sequence in request.sequences:
            self._waiting.add(sequence)
        self.num_queued += 1

    def end(self, request: Request) -> None:
        """End every sequence of a request and free its blocks; what was computed stays in the cache."""
        for sequence in request.sequences:
            self._end_sequence(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End one sequence for a reason that its caller is told."""
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        self._end_sequence(sequence)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's tokens and make room for them. Running sequences come first; it may preempt some."""
        self._scheduled = []
        budget = self._schedule_running(self._limits.max_num_batched_tokens)
        self._admit_waiting(budget)
        return ScheduledBatch(
            rows=[self._row(sequence, num_tokens) for sequence, num_tokens in self._scheduled],
            copies=self._cache.take_copies(),
        )

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
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # its request failed in a row before
            if not is_finite:
                self.end(sequence.request)
                result.failed[sequence.request] = _NOT_FINITE
                continue
            if sequence.request.prompt_scores is not None and index in sampled.prompt_logprobs:
                sequence.request.prompt_scores.add(row.num_computed_tokens, sampled.prompt_logprobs[index])
            sequence.num_computed_tokens += num_tokens
            self._cache.commit(sequence)
            if row_candidates and row_candidates[0] is not None:
                selecting.setdefault(sequence.request, []).append(row_candidates[0])
            elif row_draws:
                try:
                    result.new_tokens.extend(
                        NewToken(answer, token_id, logprobs, self._append(answer, token_id))
                        for answer, (token_id, logprobs) in zip(self._answers(sequence), row_draws, strict=True)
                    )
                except RequestError as error:
                    self.end(sequence.request)
                    result.failed[sequence.request] = Failure.of(error)
            elif sequence.num_uncomputed_tokens == 0:
                self.finish(sequence, "length")
                result.computed.append(sequence.request)
        for request, group_candidates in selecting.items():
            if not request.is_finished and self._select_beams(request, group_candidates):
                result.searched.append(request)
        self._cache.end_step()
        return result

    def fail_step(self) -> list[Request]:
        """End the requests of the last schedule(), whose step was lost, and return them."""
        requests = list({id(sequence.request): sequence.request for sequence, _ in self._scheduled}.values())
        for request in requests:
            self.end(request)
        self._cache.end_step()
        return requests

    def _schedule_running(self, budget: int) -> int:
        by_rank = sorted(self._running_units(), key=self._policy.rank)
        num_tokens_of = _share_budget(by_rank, budget)
        queue = deque(by_rank)
        while queue:
            sequence = queue.popleft()
            num_tokens = num_tokens_of[sequence]
            if num_tokens < _num_uncomputed_tokens(sequence) and self._waiting.has_one_before(sequence):
                # A prompt too long for this step would keep a better priority from starting. What it has computed
                # stays in the cache, so it loses little, and whoever shares its prefix goes on from there.
                self._preempt(sequence)
            elif _is_generating_beam(sequence):
                budget -= self._schedule_beams(sequence.request, num_tokens, queue)
            elif num_tokens and self._make_room(sequence, num_tokens, queue):
                self._scheduled.append((sequence, num_tokens))
                budget -= num_tokens
        return budget

    def _running_units(self) -> list[Sequence]:
        """Return the running sequences, of each beam group only one."""
        by_unit = {sequence.request if sequence.request.beam else sequence: sequence for sequence in self._running}
        return list(by_unit.values())

    def _make_room(self, sequence: Sequence, num_tokens: int, queue: deque[Sequence]) -> bool:
        """Make room for a running or parked sequence's next tokens, at the cost of those in queue, the last one first.

        They come after it in rank and have no place in this step yet. So a scheduled row never loses its blocks, and
        the first in rank never gives way: it advances in every step, and ends. False: the sequence itself gave way.
        """
        match = self._cache.match(sequence) if sequence.status is SequenceStatus.PARKED else None
        while not self._cache.allocate(sequence, num_tokens, match):
            victim = queue.pop() if queue else sequence
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _schedule_beams(self, request: Request, budget: int, queue: deque[Sequence]) -> int:
        """Schedule the next step of a group that has generated tokens, and return how many tokens it takes."""
        group = request.beam
        assert group is not None
        if budget < len(request.sequences):
            return 0
        for beam in resume_order(request.sequences) if _is_behind(request.sequences[0]) else ():
            if beam.status is SequenceStatus.PARKED:
                if not self._make_room(beam, 0, queue):
                    return 0
                beam.status = SequenceStatus.RUNNING
                self._running.append(beam)
            num_tokens = min(beam.num_uncomputed_tokens - 1, budget)
            if num_tokens > 0:
                if not self._make_room(beam, num_tokens, queue):
                    return 0
                self._scheduled.append((beam, num_tokens))
                return num_tokens
        for beam in request.sequences:
            block_ids = beam.block_table[:]
            if not self._make_room(beam, 1, queue):
                return 0
            if beam.block_table[: len(block_ids)] != block_ids:
                group.record_copy()
        self._scheduled += [(beam, 1) for beam in request.sequences]
        return len(request.sequences)

    def _resume_beams(self, sequence: Sequence, budget: int) -> int:
        """Let the group that a sequence waits for run again; return how many tokens it takes, 0 if it still waits."""
        request = sequence.request
        if budget < len(request.sequences):
            return 0
        self._waiting.remove(sequence)
        sequence.status = SequenceStatus.PARKED
        return self._schedule_beams(request, budget, deque())

    def _select_beams(self, request: Request, candidates: list[list[tuple[int, float]]]) -> bool:
        """Fork and release beams as their candidates demand. Returns whether the search is over, its blocks free."""
        group, beams = request.beam, request.sequences
        assert group is not None
        group.record_blocks(*count_blocks(beams, self._cache.block_size))
        children = group.select([beam.token_ids[request.num_prompt_tokens :] for beam in beams], candidates)
        if group.is_done:
            self.end(request)
            return True
        fork_and_release(request, children, self._cache)
        others = [sequence for sequence in self._running if sequence.request is not request]
        self._running = others + request.sequences
        return False

    def _admit_waiting(self, budget: int) -> None:
        num_free_places = self._limits.max_num_seqs - sum(map(_num_reserved_places, self._running_units()))
        # Everyone needs a block at least. So a step that can admit nobody looks up nothing.
        if not budget or not num_free_places or self._num_spare_blocks() <= 0:
            return
        being_computed = {self._next_digest(sequence) for sequence, num_tokens in self._scheduled if num_tokens > 1}
        for sequence, match in (found for members in self._waiting.rounds() for found in members):
            if not budget or _num_reserved_places(sequence) > num_free_places:
                return
            digest = self._cache.next_digest(sequence, len(match.block_ids))
            # One that scores its prompt computes the block in any case.
            can_wait = match.num_tokens < sequence.num_reusable_tokens
            if digest is not None and digest in being_computed and can_wait:
                # A prompt of this step computes this very block. As there is budget left, it has all of its tokens in
                # the step, so to wait costs one step; if its writer does not finish it, this one computes it then.
                continue
            if self._running and self._num_blocks_taken(sequence, match) > self._num_spare_blocks():
                return
            if _is_generating_beam(sequence):
                num_tokens = self._resume_beams(sequence, budget)
                if not num_tokens:
                    return
                num_free_places -= _num_reserved_places(sequence)
                budget -= num_tokens
                continue
            num_tokens = min(sequence.num_tokens - match.num_tokens, budget)
            if not self._cache.allocate(sequence, num_tokens, match):
                return
            self._start(sequence)
            self._scheduled.append((sequence, num_tokens))
            being_computed.add(self._next_digest(sequence))
            num_free_places -= _num_reserved_places(sequence)
            budget -= num_tokens

    def _num_spare_blocks(self) -> int:
        """Blocks that are left when each running sequence keeps the room for all its tokens, and a block at least.

        Whoever is admitted into less is soon preempted again: on a pool that is too small for its load this halves the
        preemptions and saves a tenth of all computed tokens, for 5 % more steps.
        """
        num_kept = sum(
            max(self._num_blocks_for(running) - self._num_held_blocks(running), 1) for running in self._running_units()
        )
        return self._cache.num_available_blocks - num_kept

    def _num_blocks_taken(self, sequence: Sequence, match: Match) -> int:
        """How many available blocks a sequence takes, or its beam group, with all tokens, if it starts from a match."""
        num_taken = self._cache.num_blocks_taken(sequence, match)
        if sequence.request.beam is None:
            return num_taken
        num_alone = -(-sequence.num_tokens // self._cache.block_size)
        return num_taken + num_blocks_wanted(sequence.request, self._cache.block_size) - num_alone

    def _num_blocks_for(self, sequence: Sequence) -> int:
        if sequence.request.beam is not None:
            return num_blocks_wanted(sequence.request, self._cache.block_size)
        return -(-sequence.num_tokens // self._cache.block_size)

    def _num_held_blocks(self, sequence: Sequence) -> int:
        if sequence.request.beam is not None:
            return count_blocks(sequence.request.sequences, self._cache.block_size)[0]
        return len(sequence.block_table)

    def _next_digest(self, sequence: Sequence) -> bytes | None:
        return self._cache.next_digest(sequence, sequence.num_committed_blocks)

    def _start(self, sequence: Sequence) -> None:
        request = sequence.request
        num_ahead = self._waiting.num_new_ahead(sequence)
        self._waiting.remove(sequence)
        if not request.has_started:
            self.num_overtakes += num_ahead
            self.num_started += 1
            self.queue_seconds += time.monotonic() - request.queued_at
            request.num_cached_tokens = sequence.num_computed_tokens
            self.num_queued -= 1
            self._cache.record_query(request.num_prompt_tokens, sequence.num_computed_tokens)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        # What it computed is committed already, so it finds its own blocks again when it resumes.
        for member in _unit(sequence):
            if member.status is SequenceStatus.RUNNING:
                self._cache.release(member)
                self._running.remove(member)
                member.status = SequenceStatus.PARKED
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)
        self.num_preemptions += 1

    def _row(self, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        start = sequence.num_computed_tokens
        end = start + num_tokens
        scores = sequence.request.prompt_scores
        return ScheduledRow(
            token_ids=sequence.token_ids[start:end],
            num_computed_tokens=start,
            block_table=sequence.block_table,
            samples=self._sample_slots(sequence) if end == sequence.num_tokens else (),
            num_prompt_logprobs=scores.num_alternatives if scores is not None else 0,
            prompt_targets=scores.targets(sequence.token_ids, start, end) if scores is not None else array("i"),
        )

    def _sample_slots(self, sequence: Sequence) -> tuple[SampleSlot, ...]:
        request = sequence.request
        first = sequence.choice_index
        if request.params.max_tokens == 0:
            return ()
        constraint = sequence.constraint
        allowed_tokens = request.allowed_tokens if constraint is None else constraint.allowed_tokens()
        return tuple(
            SampleSlot(
                params=request.params,
                seed=request.seed,
                choice_index=choice_index,
                token_ids=sequence.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                suppressed_token_ids=(*self._suppressed_token_ids(sequence), *sequence.banned_token_ids),
                allowed_tokens=allowed_tokens,
                num_candidates=0 if request.beam is None else request.beam.num_candidates,
            )
            for choice_index in range(first, first + _num_places(sequence))
        )

    def _suppressed_token_ids(self, sequence: Sequence) -> tuple[int, ...]:
        params = sequence.request.params
        is_early = sequence.num_output_tokens < params.min_tokens
        # A constrained text is over at its end token, so to go on beyond it means not to draw it.
        ends_are_suppressed = sequence.constraint is not None if params.ignore_eos else is_early
        return (
            *(sorted(self._limits.end_token_ids) if ends_are_suppressed else ()),
            *(params.stop_token_ids if is_early else ()),
        )

    def _answers(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that a row's draws belong to, forking the prompt's for the other choices once."""
        request = sequence.request
        for choice_index in range(len(request.sequences), len(request.sequences) + _num_places(sequence) - 1):
            child = Sequence(request, choice_index, array("i", sequence.token_ids), status=SequenceStatus.RUNNING)
            if sequence.constraint is not None:
                child.constraint = sequence.constraint.fork()
            self._cache.fork(sequence, child)
            self._running.append(child)
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
            self._cache.release(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            self.num_queued -= not sequence.request.has_started
        sequence.status = SequenceStatus.FINISHED


def _share_budget(sequences: list[Sequence], budget: int) -> dict[Sequence, int]:
    """Return how many tokens each sequence computes, those in front first.

    Generating sequences come before prompts: a long prompt gets what they leave, so it delays no one's next token by a
    step. A budget of a token for each sequence lets the first prompt advance too.
    """
    shares = {}
    for sequence in sorted(sequences, key=_is_behind):
        shares[sequence] = min(_num_uncomputed_tokens(sequence), budget)
        budget -= shares[sequence]
    return shares


def _num_places(sequence: Sequence) -> int:
    """Running sequences that this one stands for: all choices of its request until its prompt is computed."""
    request = sequence.request
    return request.params.n if len(request.sequences) == 1 and sequence.num_output_tokens == 0 else 1


def _num_reserved_places(sequence: Sequence) -> int:
    """Places of max_num_seqs that a sequence takes, or the group that it is a beam of: all that it may come to need."""
    return _num_places(sequence) if sequence.request.beam is None else sequence.request.beam.width


def _unit(sequence: Sequence) -> list[Sequence]:
    """Return the sequences that run, wait and give up their blocks together with this one."""
    return [sequence] if sequence.request.beam is None else sequence.request.sequences


def _num_uncomputed_tokens(sequence: Sequence) -> int:
    """Return how many tokens it, or all beams of its group together, have without K/V."""
    return sum(member.num_uncomputed_tokens for member in _unit(sequence))


def _is_behind(sequence: Sequence) -> bool:
    """Whether it, or another beam of its group, has more to compute than its last token."""
    return any(member.num_uncomputed_tokens > 1 for member in _unit(sequence))


def _is_generating_beam(sequence: Sequence) -> bool:
    return sequence.request.beam is not None and sequence.num_output_tokens > 0
