"""Statistics of logits, predictions and the weights of heads, reports and plots."""
