"""From a ScheduledBatch to SampledTokens: K/V storage, tensors, the model, the executor."""
