"""From logits to tokens: processors and the sampler."""
