"""Run scheduled batches on a device."""

from typing import Protocol

from radixserve.core.batch import SampledTokens, ScheduledBatch


class Executor(Protocol):
    """Owns the model and the K/V storage. The engine's tests drive it with a table of probabilities instead."""

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        """Run spills, loads, copies, forward, logits, processors and the sampler; return a token for each sample slot.

        Raises nothing for bad numbers (see SampledTokens.is_finite); an exception means the step is lost.
        """
