"""Statistics of logits and predictions, reports and plots."""
