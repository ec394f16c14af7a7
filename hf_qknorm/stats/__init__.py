"""Statistics of logits, predictions and the weights of heads, and the style of plots."""
