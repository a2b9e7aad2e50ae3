"""The ways to compute a run's model, one class each: plain torch, Transformer Engine, our own fused FP8 chain."""
